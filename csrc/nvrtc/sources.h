// The sources of the kernels, which setup.py writes into the library: they are those that its launchers were built with.
#pragma once

namespace gradzip::driver {

struct Source {
  const char* path;  // as others include it: "cuda/select.cuh"
  const char* text;
};

extern const Source sources[];  // the last one is null

}  // namespace gradzip::driver
