// A stand-in for NVIDIA's driver, libcuda.so.1: a device of compute capability 9.0 with 3 multiprocessors, which runs
// nothing. Appends a line to the file $STAND_IN_LOG for each module loaded, each launch and each memory fill:
//
//   load FIRST-4-BYTES          get SYMBOL
//   launch GRID-X GRID-Y BLOCK SHARED-BYTES BYTES-OF-EACH-PARAMETER
//   fill BYTES VALUE ADDRESS
//
// Sizes of parameters are not in the interface. They come from the file $STAND_IN_SIZES: a line `SYMBOL: SIZE...` each.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

thread_local void* current = nullptr;
int primary_context;

struct Function {
  std::vector<size_t> sizes;
};

void log(const std::string& line) { std::ofstream(std::getenv("STAND_IN_LOG"), std::ios::app) << line << '\n'; }

std::string hex(const void* at, size_t nbytes) {
  std::string text = " ";
  for (size_t i = 0; i < nbytes; ++i)
    for (int shift : {4, 0}) text += "0123456789abcdef"[static_cast<const unsigned char*>(at)[i] >> shift & 15];
  return text;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuGetExportTable(const void** table, const void*) { return *table = nullptr, 500; }  // for NVRTC, which calls it
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorString(int status, const char** text) {
  *text = status == 500 ? "named symbol not found" : "an error";
  return 0;
}
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGetName(char* name, int size, int) { return std::strncpy(name, "stand-in", size_t(size)), 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16 ? 3 : attribute == 75 ? 9 : 0;
  return 0;
}
int cuDeviceTotalMem_v2(size_t* nbytes, int) { return *nbytes = size_t(80) << 30, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &primary_context, 0; }
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuCtxSetCurrent(void* context) { return current = context, 0; }
int cuCtxGetDevice(int* device) { return *device = 0, current ? 0 : 201; }

int cuModuleLoadData(void** module, const void* image) {
  log("load" + hex(image, 4));
  *module = &primary_context;
  return 0;
}

int cuModuleGetFunction(void** function, void*, const char* symbol) {
  log(std::string("get ") + symbol);
  std::ifstream file(std::getenv("STAND_IN_SIZES"));
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(std::string(symbol) + ": ", 0) != 0) continue;
    auto* found = new Function;
    std::istringstream sizes(line.substr(std::strlen(symbol) + 2));
    for (size_t size; sizes >> size;) found->sizes.push_back(size);
    return *function = found, 0;
  }
  return 500;
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned, unsigned block, unsigned, unsigned,
                   unsigned shared, void*, void** parameters, void**) {
  std::string line = "launch";
  for (unsigned n : {x, y, block, shared}) line += " " + std::to_string(n);
  for (size_t size : static_cast<Function*>(function)->sizes) line += hex(*parameters++, size);
  log(line);
  return 0;
}

int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t nbytes, void*) {
  log("fill " + std::to_string(nbytes) + " " + std::to_string(int(value)) + hex(&to, sizeof to));
  return 0;
}
}
