// Calls one kernel several times, for benchmarks/instructions.py. usage: instructions KERNEL TIMES
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cpu/ops.h"
#include "cpu/simd.h"

using namespace gradzip;
using namespace gradzip::cpu;

int main(int argc, char** argv) {
  constexpr int64_t n = 9 << 16;  // rows of 64 and of 3 x 3
  constexpr uint32_t kFourier64 = 1 | 6 << 8, kDct3x3 = 2 << 8 | 2 << 16;  // as Transform.code of gradzip/ops/transform.py
  constexpr int64_t kept = n * 15 / 100;
  std::vector<float> x(n), out(n), scratch(2 * n), values(n);
  std::vector<uint8_t> bytes(4 * n);
  uint64_t state = 88172645463325252u;
  for (float& value : x)  // the sum of six uniform numbers: about normal
    for (int i = 0; i < 6; ++i) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      value += float(state >> 40) / float(1 << 24) - 0.5f;
    }
  Selection selection;
  RangeFloat format;
  int64_t outside;
  const uint64_t key = 1;
  range_float_fit(&format, x.data(), n, 10, -1, 1.0f, -1.0f, 1);
  const auto select_of = [&](uint32_t code, int64_t k) {
    transform_select(x.data(), n, code, k, scratch.data(), 2 * n, bytes.data(), values.data(), 1);
  };
  const std::map<std::string, std::function<void()>> kernels = {
      {"abs_max", [&] { abs_max(x.data(), n, out.data(), 1); }},
      {"select 15%", [&] { select(x.data(), n, kept, &selection, 1); }},
      {"transform Fourier 64", [&] { transform(x.data(), n, kFourier64, out.data(), 1); }},
      {"transform DCT 3x3", [&] { transform(x.data(), n, kDct3x3, out.data(), 1); }},
      {"transform_select Fourier 64, 15%", [&] { select_of(kFourier64, kept / 2); }},
      {"transform_select DCT 3x3, 15%", [&] { select_of(kDct3x3, kept); }},
      {"range_float_encode_packed", [&] {
         range_float_encode_packed(&format, x.data(), n, 10, false, 0, bytes.data(), &outside, 1);
       }},
      {"block_float_encode 8 bits", [&] {
         block_float_encode(x.data(), nullptr, 1, n, n / 256, 8, 256, &key, nullptr, bytes.data(), 1);
       }},
      {"block_float_encode 4 bits", [&] {
         block_float_encode(x.data(), nullptr, 1, n, n / 256, 4, 256, &key, nullptr, bytes.data(), 1);
       }},
  };
  if (argc == 1) {
    for (const auto& kernel : kernels) std::puts(kernel.first.c_str());
    std::printf("%lld\n", (long long)n);
    return 0;
  }
  set_simd(Simd::avx2);
  for (int i = std::atoi(argv[2]); i > 0; --i) kernels.at(argv[1])();
}
