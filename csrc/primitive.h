// How primitives are bound: pointers and references are addresses in Python, and the GIL is released around each call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace gradzip {

namespace py = pybind11;

// How a parameter of a primitive arrives from Python: pointers and references as addresses.
template <class T>
struct Argument {
  using type = T;
  static T pass(T value) { return value; }
};
template <class T>
struct Argument<T*> {
  using type = uintptr_t;
  static T* pass(uintptr_t address) { return reinterpret_cast<T*>(address); }
};
template <class T>
struct Argument<const T&> {
  using type = uintptr_t;
  static const T& pass(uintptr_t address) { return *reinterpret_cast<const T*>(address); }
};

template <auto function>
struct Primitive;
template <class R, class... A, R (*function)(A...)>
struct Primitive<function> {
  static R call(typename Argument<A>::type... arguments) { return function(Argument<A>::pass(arguments)...); }
};

template <auto function>
void def(py::module_& m, const char* name) {
  m.def(name, Primitive<function>::call, py::call_guard<py::gil_scoped_release>());
}

}  // namespace gradzip
