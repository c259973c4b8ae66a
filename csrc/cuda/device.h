// The CUDA runtime, driver and devices of this machine, as `gradzip info` reports them.
//
// Plain C++: the bindings include it without the CUDA headers.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace gradzip::cuda {

struct Device {
  std::string name;
  int major;           // compute capability
  int minor;
  std::size_t memory;  // bytes
};

// Versions as CUDA numbers them: 13000 is 13.0.
int runtime_version();  // of the runtime this was linked with
int driver_version();   // newest version that the installed driver supports; 0 without a driver

// The devices that this process may use; empty, without an exception, if there is no driver or no device.
std::vector<Device> devices();

}  // namespace gradzip::cuda
