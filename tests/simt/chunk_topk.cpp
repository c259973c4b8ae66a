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
  float expected_most;
  const ChunkSource on_cpu{x, n, k, expected, records};
  cpu::chunk_topk(&on_cpu, 1, dtype, chunk, &expected_most, 1);
  const simt::Buffer<float> expected_values(kept);
  int32_t expected_failed = 0;
  const ChunkRecords records_on_cpu{records, n, k, expected_values};
  cpu::chunk_topk_values(&records_on_cpu, 1, chunk, &expected_failed, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<int32_t> indices(kept);
    const simt::Buffer<uint32_t> got(words);
    const simt::Buffer<float> values(kept);
    const simt::Buffer<float> most(1);
    const ChunkSource source{x, n, k, indices, reinterpret_cast<uint8_t*>(got.get())};
    cuda::chunk_topk(&source, 1, dtype, chunk, most, nullptr);
    simt::expect_equal(float_bits(*most.get()), float_bits(expected_most), "chunk_topk: most, " + what);
    simt::expect_equal(indices.get(), expected.get(), kept, "chunk_topk: indices, " + what);
    simt::expect_equal(got.get(), expected_records.get(), words, "chunk_topk: records, " + what);
    int32_t failed = 0;
    const ChunkRecords of{records, n, k, values};
    cuda::chunk_topk_values(&of, 1, chunk, &failed, nullptr);
    simt::expect_equal(failed, expected_failed, "chunk_topk_values: failed, " + what);
    for (int64_t i = 0; i < kept; ++i)  // those of chunks that are not finite differ
      if (std::isfinite(expected_values[i]))
        simt::expect_equal(values[i], expected_values[i], "chunk_topk_values, " + what);
      else if (!std::isnan(values[i]))
        simt::fail("chunk_topk_values: a value of a chunk that is not finite is not NaN");
    cuda::chunk_topk_values(&of, 1, chunk, nullptr, nullptr);
  });
}

// More vectors than a launch takes, of different sizes and k.
static void test_several(int64_t chunk) {
  constexpr int64_t kCount = cuda::kChunkRecords + 3;
  static_assert(cuda::kChunkSources < cuda::kChunkRecords);
  std::vector<simt::Buffer<BFloat16>> xs;
  std::vector<simt::Buffer<int32_t>> wanted_indices, indices;
  std::vector<simt::Buffer<uint32_t>> wanted_records, records;
  std::vector<simt::Buffer<float>> wanted_values, values;
  std::vector<ChunkSource> there, here;
  std::vector<ChunkRecords> records_there, records_here;
  for (int64_t i = 0; i < kCount; ++i) {
    const int64_t n = i % 25 == 24 ? 9000 + i : i % 40 * i, k = 1 + i * 3 % chunk;
    const int64_t kept = chunks_count(n, chunk, k), words = (n + chunk - 1) / chunk * chunk_words(k);
    const simt::Kind kind = i == 60 ? simt::Kind::wild : simt::Kind::normal;
    xs.emplace_back(simt::as<BFloat16>(simt::data(kind, n)), i % 4);
    for (auto* of : {&wanted_indices, &indices}) of->emplace_back(kept);
    for (auto* of : {&wanted_records, &records}) of->emplace_back(words);
    for (auto* of : {&wanted_values, &values}) of->emplace_back(kept);
    const auto bytes = [](const simt::Buffer<uint32_t>& of) { return reinterpret_cast<uint8_t*>(of.get()); };
    there.push_back({xs.back().get(), n, k, wanted_indices.back(), bytes(wanted_records.back())});
    here.push_back({xs.back().get(), n, k, indices.back(), bytes(records.back())});
    records_there.push_back({bytes(wanted_records.back()), n, k, wanted_values.back()});
    records_here.push_back({bytes(records.back()), n, k, values.back()});
  }
  const int dtype = int(Dtype::bfloat16);
  const simt::Buffer<float> wanted_most(kCount), most(kCount);
  cpu::chunk_topk(there.data(), kCount, dtype, chunk, wanted_most, 2);
  cuda::chunk_topk(here.data(), kCount, dtype, chunk, most, nullptr);
  int32_t failed_there = 0, failed = 0;
  cpu::chunk_topk_values(records_there.data(), kCount, chunk, &failed_there, 2);
  cuda::chunk_topk_values(records_here.data(), kCount, chunk, &failed, nullptr);
  simt::expect_equal(failed, int32_t(failed_there > 0), "chunk_topk_values of several: failed");
  simt::expect_equal(reinterpret_cast<uint32_t*>(most.get()), reinterpret_cast<uint32_t*>(wanted_most.get()), kCount,
                     "chunk_topk of several: most");
  for (size_t i = 0; i < size_t(kCount); ++i) {
    simt::expect_equal(indices[i].get(), wanted_indices[i].get(), indices[i].size(), "chunk_topk of several: indices");
    simt::expect_equal(records[i].get(), wanted_records[i].get(), records[i].size(), "chunk_topk of several: records");
    if (std::isfinite(most[i]))
      simt::expect_equal(values[i].get(), wanted_values[i].get(), values[i].size(), "chunk_topk_values of several");
  }
}

int main() {
  for (int64_t chunk : {32, 4096}) test_several(chunk);
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
