// Binds kernels to Python: pointers are passed as addresses, and the GIL is released during each call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <type_traits>

namespace gradzip {

namespace py = pybind11;

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

template <auto function>
struct Kernel;
template <class R, class... A, R (*function)(A...)>
struct Kernel<function> {
  static constexpr bool takes_workspace = !std::is_void_v<R>;
  static R call(typename Argument<A>::type... arguments) { return function(Argument<A>::pass(arguments)...); }
  // For kernels without scratch memory: they run in the first call of the two-phase convention (cuda/ops.h).
  static int64_t call_at_once(uintptr_t, typename Argument<A>::type... arguments) {
    call(arguments...);
    return 0;
  }
};

// f(arguments..., threads) -> None
template <auto function>
void bind_cpu(py::module_& m, const char* name) {
  m.def(name, Kernel<function>::call, py::call_guard<py::gil_scoped_release>());
}

// f(workspace, arguments..., stream) -> bytes of workspace that are missing
template <auto function>
void bind_cuda(py::module_& m, const char* name) {
  if constexpr (Kernel<function>::takes_workspace)
    m.def(name, Kernel<function>::call, py::call_guard<py::gil_scoped_release>());
  else
    m.def(name, Kernel<function>::call_at_once, py::call_guard<py::gil_scoped_release>());
}

}  // namespace gradzip
