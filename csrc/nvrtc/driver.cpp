#include "nvrtc/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string_view>

#include "nvrtc/cuda_runtime.h"

namespace gradzip::driver {
namespace {

constexpr int kNotFound = 35;  // the runtime's number for "driver version is insufficient"; not one of the driver's
constexpr int kMajor = 75, kMinor = 76;  // attributes of devices

using Context = void*;
using Address = unsigned long long;

// The interface of libcuda.so.1, which is not linked: there may be none.
struct Driver {
  int (*cuInit)(unsigned);
  int (*cuDriverGetVersion)(int*);
  int (*cuGetErrorString)(int, const char**);
  int (*cuDeviceGetCount)(int*);
  int (*cuDeviceGetName)(char*, int, int);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuDeviceTotalMem_v2)(size_t*, int);
  int (*cuDevicePrimaryCtxRetain)(Context*, int);
  int (*cuCtxGetCurrent)(Context*);
  int (*cuCtxSetCurrent)(Context);
  int (*cuCtxGetDevice)(int*);
  int (*cuModuleLoadData)(void**, const void*);
  int (*cuModuleGetFunction)(void**, void*, const char*);
  int (*cuMemsetD8Async)(Address, unsigned char, size_t, cudaStream_t);
  int (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cudaStream_t,
                        void**, void**);

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#define FIND(name) name = reinterpret_cast<decltype(name)>(library ? dlsym(library, #name) : nullptr)
    FIND(cuInit);
    FIND(cuDriverGetVersion);
    FIND(cuGetErrorString);
    FIND(cuDeviceGetCount);
    FIND(cuDeviceGetName);
    FIND(cuDeviceGetAttribute);
    FIND(cuDeviceTotalMem_v2);
    FIND(cuDevicePrimaryCtxRetain);
    FIND(cuCtxGetCurrent);
    FIND(cuCtxSetCurrent);
    FIND(cuCtxGetDevice);
    FIND(cuModuleLoadData);
    FIND(cuModuleGetFunction);
    FIND(cuMemsetD8Async);
    FIND(cuLaunchKernel);
#undef FIND
    if (cuInit) cuInit(0);  // if it fails, so do other calls
  }
};

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

template <class... P, class... A>
cudaError_t call(int (*Driver::*function)(P...), A... arguments) {
  return cudaError_t(driver().*function ? (driver().*function)(P(arguments)...) : kNotFound);
}

std::vector<std::unique_ptr<Entry>>& all() {
  static std::vector<std::unique_ptr<Entry>> entries;
  return entries;
}
Compiler compiler;
std::mutex loading;

void check(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) throw std::runtime_error(what + ": " + cudaGetErrorString(status));
}

// The current context of this thread. A thread without one uses device 0, as the runtime does.
cudaError_t current(Context* context) {
  if (const cudaError_t status = call(&Driver::cuCtxGetCurrent, context); status || *context) return status;
  if (const cudaError_t status = call(&Driver::cuDevicePrimaryCtxRetain, context, 0)) return status;
  return call(&Driver::cuCtxSetCurrent, *context);
}

// Compiles and loads all kernels of the unit for the device of the current context.
void load(const std::string& module, const std::string& unit, Context context) {
  int device = 0, major = 0, minor = 0, version = 0;
  check(call(&Driver::cuCtxGetDevice, &device), "cuCtxGetDevice");
  check(call(&Driver::cuDeviceGetAttribute, &major, kMajor, device), "cuDeviceGetAttribute");
  check(call(&Driver::cuDeviceGetAttribute, &minor, kMinor, device), "cuDeviceGetAttribute");
  check(call(&Driver::cuDriverGetVersion, &version), "cuDriverGetVersion");
  std::vector<Entry*> together;
  std::vector<std::string> names;
  for (const auto& entry : all()) {
    if (entry->module != module || entry->unit != unit) continue;
    together.push_back(entry.get());
    names.push_back(entry->name);
  }
  const Module compiled = compiler(module, names, 10 * major + minor, version);
  void* loaded = nullptr;
  check(call(&Driver::cuModuleLoadData, &loaded, compiled.image.data()), "loading kernels of " + module);
  for (Entry* entry : together) {
    void* function = nullptr;
    check(call(&Driver::cuModuleGetFunction, &function, loaded, compiled.symbols.at(entry->name).c_str()), entry->name);
    entry->functions[context] = function;
  }
}

}  // namespace

const std::vector<std::unique_ptr<Entry>>& entries() { return all(); }

Entry* add(const char* source, const char* signature, std::initializer_list<size_t> sizes) {
  std::string_view module = source, name = signature;
  module.remove_prefix(module.rfind('/') + 1);
  module = module.substr(0, module.rfind('.'));
  name.remove_prefix(name.rfind(" = ") + 3);
  name.remove_suffix(1);                           // ]
  if (name.front() == '&') name.remove_prefix(1);  // of clang
  // Types of gradzip are in CamelCase; built-in ones and numbers have no capital letters.
  std::string_view unit = name.substr(std::min(name.find('<'), name.size()));
  if (std::none_of(unit.begin(), unit.end(), [](char c) { return c >= 'A' && c <= 'Z'; })) unit = {};
  all().push_back(std::make_unique<Entry>(Entry{std::string(module), std::string(name), std::string(unit), sizes, {}}));
  return all().back().get();
}

void set_compiler(Compiler c) { compiler = std::move(c); }

}  // namespace gradzip::driver

using namespace gradzip::driver;

cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return call(&Driver::cuDriverGetVersion, version); }
cudaError_t cudaGetDeviceCount(int* count) { return call(&Driver::cuDeviceGetCount, count); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int index) {
  const auto name = call(&Driver::cuDeviceGetName, device->name, int(sizeof device->name), index);
  const auto major = call(&Driver::cuDeviceGetAttribute, &device->major, kMajor, index);
  const auto minor = call(&Driver::cuDeviceGetAttribute, &device->minor, kMinor, index);
  const auto memory = call(&Driver::cuDeviceTotalMem_v2, &device->totalGlobalMem, index);
  return name ? name : major ? major : minor ? minor : memory;
}

cudaError_t cudaGetDevice(int* device) {
  Context context = nullptr;
  const cudaError_t status = current(&context);
  return status ? status : call(&Driver::cuCtxGetDevice, device);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call(&Driver::cuDeviceGetAttribute, value, attribute, device);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream) {
  Context context = nullptr;
  if (const cudaError_t status = current(&context); status || !nbytes) return status;
  return call(&Driver::cuMemsetD8Async, reinterpret_cast<Address>(to), value, nbytes, stream);
}

cudaError_t cudaGetLastError() { return cudaSuccess; }  // the driver keeps none

const char* cudaGetErrorString(cudaError_t status) {
  const char* text = nullptr;
  if (status == kNotFound) return "no driver (libcuda.so.1), or one that is too old; install NVIDIA's";
  call(&Driver::cuGetErrorString, status, &text);
  return text ? text : "unknown error";
}

cudaError_t cudaLaunch(const cudaLaunchConfig_t& config, Entry& entry, void** arguments) {
  Context context = nullptr;
  if (const cudaError_t status = current(&context)) return status;
  void* function = nullptr;
  {
    const std::lock_guard<std::mutex> lock(loading);
    if (!entry.functions.count(context)) load(entry.module, entry.unit, context);
    function = entry.functions.at(context);
  }
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  return call(&Driver::cuLaunchKernel, function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
              config.dynamicSmemBytes, config.stream, arguments, nullptr);
}
