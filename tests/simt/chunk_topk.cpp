// chunk_topk and chunk_topk_values.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/chunk_topk.cu"

using namespace gradzip;

template <class T>
static void test(const simt::Buffer<T>& x, int64_t n, int64_t chunk, int64_t k) {
  const int dtype = dtype_of(x);
  const std::string what = "chunk = " + std::to_string(chunk) + ", k = " + std::to_string(k);
  const int64_t chunks = (n + chunk - 1) / chunk, words = chunks * chunk_words(k), last = n % chunk;
  const int64_t kept = n / chunk * k + (last ? chunk_count(last, chunk, k) : 0);
  const simt::Buffer<int32_t> expected(kept);
  const simt::Buffer<uint32_t> expected_records(words);
  auto* const records = reinterpret_cast<uint8_t*>(expected_records.get());
  cpu::chunk_topk(x, dtype, n, chunk, k, expected, records, 1);
  const simt::Buffer<float> expected_values(kept);
  int32_t expected_failed = 0;
  cpu::chunk_topk_values(records, n, chunk, k, expected_values, &expected_failed, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<int32_t> indices(kept);
    const simt::Buffer<uint32_t> got(words);
    const simt::Buffer<float> values(kept);
    cuda::chunk_topk(x, dtype, n, chunk, k, indices, reinterpret_cast<uint8_t*>(got.get()), nullptr);
    simt::expect_equal(indices.get(), expected.get(), kept, "chunk_topk: indices, " + what);
    simt::expect_equal(got.get(), expected_records.get(), words, "chunk_topk: records, " + what);
    int32_t failed = 0;
    cuda::chunk_topk_values(records, n, chunk, k, values, &failed, nullptr);
    simt::expect_equal(failed, expected_failed, "chunk_topk_values: failed, " + what);
    for (int64_t i = 0; i < kept; ++i)  // those of chunks that are not finite differ
      if (std::isfinite(expected_values[i]))
        simt::expect_equal(values[i], expected_values[i], "chunk_topk_values, " + what);
      else if (!std::isnan(values[i]))
        simt::fail("chunk_topk_values: a value of a chunk that is not finite is not NaN");
    cuda::chunk_topk_values(records, n, chunk, k, values, nullptr, nullptr);
  });
}

int main() {
  const int64_t sizes[][2] = {{32, 1}, {32, 32}, {96, 7}, {256, 26}, {4096, 61}, {4096, 4096}};
  for (int64_t n : simt::kSizes)
    for (simt::Kind kind : simt::kKinds) {
      if (n > 10000 && kind != simt::Kind::ties && kind != simt::Kind::wild) continue;
      const std::vector<float> x = simt::data(kind, n);
      for (const auto& [chunk, k] : sizes) {
        if (n < 2000 || (chunk == 4096 && (k < chunk || n < 10000)) || (chunk == 256 && n < 10000))
          test(simt::Buffer<float>(x, n % 4), n, chunk, k);
        if (n < 2000 || (chunk == 4096 && k < chunk && kind == simt::Kind::wild)) {
          test(simt::Buffer<BFloat16>(simt::as<BFloat16>(x), n % 4), n, chunk, k);
          test(simt::Buffer<Float16>(simt::as<Float16>(x), n % 4), n, chunk, k);
        }
      }
    }
}
