// restore.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/restore.cu"

using namespace gradzip;

using Bytes = simt::Buffer<uint8_t>;

static std::vector<uint8_t> random_bytes(int64_t n, std::mt19937& random) {
  std::vector<uint8_t> bytes(static_cast<size_t>(n));
  for (auto& b : bytes) b = uint8_t(random());
  return bytes;
}

// Targets of all sizes, with sources, patterns, and all addresses of both.
static void test(const std::vector<int64_t>& sizes, float number, bool restored) {
  std::mt19937 random(unsigned(sizes.size()));
  std::vector<std::vector<uint8_t>> before, after;
  std::vector<Bytes> sources;
  std::vector<Restoration> table;
  int64_t all = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t n = sizes[i];
    before.push_back(random_bytes(n, random));
    sources.emplace_back(random_bytes(n, random), i % 3 ? 0 : int64_t(random() % 17));
    const uint64_t pattern = random() * 0x100000001ull;
    table.push_back({nullptr, i % 2 ? nullptr : sources.back().get(), n, pattern});
    after.push_back(before.back());
    for (int64_t b = 0; restored && b < n; ++b)
      after.back()[size_t(b)] = i % 2 ? uint8_t(pattern >> 8 * (b % 8)) : sources.back()[b];
    all += n;
  }
  const auto run = [&](auto kernel, const char* what) {
    std::vector<Bytes> targets;
    for (size_t i = 0; i < sizes.size(); ++i) {
      targets.emplace_back(before[i], i % 5 ? 0 : int64_t(i % 17));
      table[i].target = targets.back();
    }
    const simt::Buffer<float> on_device(std::vector<float>{number});
    kernel(on_device.get(), table.data(), int64_t(table.size()));
    for (size_t i = 0; i < sizes.size(); ++i) simt::expect_equal(targets[i].get(), after[i].data(), sizes[i], what);
  };
  for (int threads : {1, 2})
    run([&](const float* x, const Restoration* t, int64_t n) { cpu::restore(x, t, n, threads); }, "restore on the CPU");
  simt::in_any_order(all, [&] {
    run([](const float* x, const Restoration* t, int64_t n) { cuda::restore(x, t, n, nullptr); }, "restore");
  });
}

int main() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<int64_t> sizes, many;
  for (int64_t n : {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 48, 100, 1000, 4096, 70001, 300000})
    sizes.insert(sizes.end(), {n, n, n});  // with a source, with a pattern, at other addresses
  for (int64_t i = 0; i < 700; ++i) many.push_back(i % 41);  // more than one launch takes
  for (float number : {inf, -inf, nan, -nan}) test(sizes, number, true);
  for (float number : {0.0f, -0.0f, 1.0f, -3.4028235e38f, 1e-45f}) test(sizes, number, false);
  test(many, nan, true);
  test(many, 2.0f, false);
  test({}, nan, true);
  test({0, 0}, nan, true);
}
