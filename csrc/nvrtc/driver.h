// In a build without nvcc: the kernels that launchers ask for, by name, and the function that compiles them.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace gradzip::driver {

// Kernels of a module with the same unit are compiled together, when one of them is first launched: the same type of
// gradzip as a template argument, which a job asks for or not, or none.
struct Entry {
  std::string module;         // csrc/cuda/MODULE.cuh has it, itself or by what it includes
  std::string name;           // an expression of C++: "gradzip::cuda::select_kernel<0>"
  std::string unit;           // "<Tile>", or ""
  std::vector<size_t> sizes;  // of its parameters, in bytes
  std::map<void*, void*> functions;  // of the driver, by context
};

// All kernels that launchers ask for: known when the library is loaded.
const std::vector<std::unique_ptr<Entry>>& entries();

// For `kernel`. The signature is that of a function whose template argument is the kernel, as the compiler prints it.
Entry* add(const char* source, const char* signature, std::initializer_list<size_t> sizes);

template <auto function>
constexpr const char* signature() {
  return __PRETTY_FUNCTION__;
}

template <class... P>
struct Kernel {
  Entry* entry;
};

template <class Function>
struct KernelOf;
template <class... P>
struct KernelOf<void (*)(P...)> {
  using type = Kernel<P...>;
  static type add(const char* source, const char* signature) {
    return {driver::add(source, signature, {sizeof(P)...})};
  }
};

namespace {  // __BASE_FILE__ is of each source

// Takes no address of the kernel, so that it is not emitted.
template <auto function>
const typename KernelOf<decltype(function)>::type kernel =
    KernelOf<decltype(function)>::add(__BASE_FILE__, signature<function>());

}  // namespace

struct Module {
  std::string image;                           // a cubin
  std::map<std::string, std::string> symbols;  // names in it of the names that were asked for
};

// Compiles kernels of a module for a compute capability, as 90 for 9.0; `driver` is the driver's version, as 13000.
using Compiler =
    std::function<Module(const std::string& module, const std::vector<std::string>& names, int capability, int driver)>;
void set_compiler(Compiler compiler);

}  // namespace gradzip::driver
