// quantize, quantize_packed, quantize_decode and quantize_decode_sum.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/bucket_norms.cu"
#include "cuda/quantize.cu"

using namespace gradzip;

// Shorter than a tile's norms take, longer than a tile, and longer than a segment of a sum.
static const int64_t kBuckets[] = {1, 3, 16, 100, 512, 520, 1001, 4096, 5000, 40000, 1 << 20};

static void test(const simt::Buffer<float>& x, int64_t n, int bits, int64_t bucket, int norm) {
  bucket = std::min(bucket, std::max<int64_t>(1, n));
  const int64_t* const replays = simt::replays_for(n);
  const std::string what =
      "bits = " + std::to_string(bits) + ", bucket = " + std::to_string(bucket) + ", norm " + std::to_string(norm);
  const int64_t nbytes = (n * bits + 7) / 8, buckets = (n + bucket - 1) / bucket;
  const simt::Buffer<int32_t> expected_codes(n);
  const simt::Buffer<uint8_t> expected(nbytes);
  const simt::Buffer<float> expected_norms(buckets), expected_values(n),
      expected_sum(simt::data(simt::Kind::normal, n)), expected_three(n);
  cpu::quantize(x, n, bits, bucket, norm, 7, expected_codes, expected_norms, 1);
  const QuantizeSource on_cpu{x, n, 7, expected, expected_norms};
  cpu::quantize_packed(&on_cpu, 1, 0, bits, bucket, norm, replays, nullptr, 1);
  int32_t refused = 0;
  cpu::quantize_decode(expected_codes, expected_norms, n, bits, bucket, expected_values, &refused, 1);
  const QuantizedTerm term{expected, expected_norms}, three[] = {term, term, term};
  cpu::quantize_decode_sum(&term, 1, 1, n, bits, bucket, 0.3f, true, expected_sum, 0, &refused, 1);
  cpu::quantize_decode_sum(three, 3, 1, n, bits, bucket, 0.3f, false, expected_three, 0, &refused, 1);
  simt::expect_equal(refused, 0, "failed on the CPU");
  simt::in_any_order(n, [&] {
    const simt::Buffer<float> norms(buckets);
    const simt::Buffer<int32_t> codes(n, bits % 4), failed(std::vector<int32_t>{0});
    simt::call(cuda::quantize, x, n, bits, bucket, norm, 7, codes, norms);
    simt::expect_equal(norms.get(), expected_norms.get(), buckets, "quantize: norms, " + what);
    simt::expect_equal(codes.get(), expected_codes.get(), n, "quantize, " + what);
    const simt::Buffer<float> norms_too(buckets);
    const simt::Buffer<uint8_t> packed(nbytes, bits % 4);
    const QuantizeSource source{x, n, 7, packed, norms_too};
    simt::call(cuda::quantize_packed, &source, 1, 0, bits, bucket, norm, replays, nullptr);
    simt::expect_equal(norms_too.get(), expected_norms.get(), buckets, "quantize_packed: norms, " + what);
    simt::expect_equal(packed.get(), expected.get(), nbytes, "quantize_packed, " + what);
    const simt::Buffer<float> values(n), sum(simt::data(simt::Kind::normal, n), bits % 4), sum_of_three(n, bits % 3);
    cuda::quantize_decode(codes, norms, n, bits, bucket, values, failed, nullptr);
    simt::expect_equal(values.get(), expected_values.get(), n, "quantize_decode, " + what);
    const QuantizedTerm coded{packed, norms}, and_again[] = {coded, coded, coded};
    cuda::quantize_decode_sum(&coded, 1, 1, n, bits, bucket, 0.3f, true, sum, 0, failed, nullptr);
    simt::expect_equal(sum.get(), expected_sum.get(), n, "quantize_decode_sum onto other numbers, " + what);
    cuda::quantize_decode_sum(and_again, 3, 1, n, bits, bucket, 0.3f, false, sum_of_three, 0, failed, nullptr);
    simt::expect_equal(sum_of_three.get(), expected_three.get(), n, "quantize_decode_sum, " + what);
    simt::expect_equal(*failed.get(), 0, "failed, " + what);
    if (n == 0) return;
    codes[n / 2] = 1 << (bits - 1);
    cuda::quantize_decode(codes, norms, n, bits, bucket, values, failed, nullptr);
    simt::expect_equal(*failed.get(), 1, "quantize_decode of a level beyond the largest: failed");
    *failed.get() = 0;
    norms[buckets - 1] = n % 2 ? -1.0f : INFINITY;
    cuda::quantize_decode_sum(and_again, 2, 1, n, bits, bucket, 0.3f, false, sum, 0, failed, nullptr);
    simt::expect_equal(*failed.get(), 1, "quantize_decode_sum of a norm there is not: failed");
    for (int64_t i = (buckets - 1) * bucket; i < n; ++i)
      simt::expect_equal(std::isnan(sum[i]), true, "quantize_decode_sum of a norm there is not");
  });
}

// 16-bit floats in and out.
template <class T>
static void test_half(int64_t n, int bits, int64_t bucket, int norm) {
  const int64_t nbytes = (n * bits + 7) / 8, buckets = (n + bucket - 1) / bucket;
  const simt::Buffer<T> x(simt::as<T>(simt::data(simt::Kind::wild, n)), n % 4), expected_sum(n), sum(n, n % 3);
  const simt::Buffer<float> expected_norms(buckets), norms(buckets);
  const simt::Buffer<uint8_t> expected(nbytes), packed(nbytes);
  const int dtype = dtype_of(x);
  const QuantizeSource on_cpu{x, n, 7, expected, expected_norms}, source{x, n, 7, packed, norms};
  const simt::Buffer<float> most(1);
  float expected_most = 1.0f;
  cpu::quantize_packed(&on_cpu, 1, dtype, bits, bucket, norm, nullptr, &expected_most, 1);
  simt::call(cuda::quantize_packed, &source, 1, dtype, bits, bucket, norm, nullptr, most);
  simt::expect_equal(*most.get(), expected_most, "quantize_packed of 16-bit floats: most");
  simt::expect_equal(packed.get(), expected.get(), nbytes, "quantize_packed of 16-bit floats");
  simt::expect_equal(norms.get(), expected_norms.get(), buckets, "quantize_packed of 16-bit floats: norms");
  const QuantizedTerm terms[] = {{packed, norms}, {packed, norms}};
  int32_t failed = 0;
  cpu::quantize_decode_sum(terms, 2, 1, n, bits, bucket, 0.3f, false, expected_sum, dtype, &failed, 1);
  cuda::quantize_decode_sum(terms, 2, 1, n, bits, bucket, 0.3f, false, sum, dtype, &failed, nullptr);
  simt::expect_equal(sum.get(), expected_sum.get(), n, "quantize_decode_sum to 16-bit floats");
  simt::expect_equal(failed, 0, "quantize_decode_sum to 16-bit floats: failed");
}

// Parts of a vector, of one length or two, whose norms and levels are sections of a payload each; then these parts with
// others that are empty, or a few elements of the vector.
template <class T>
static void test_vectors(int64_t n, int64_t parts, int bits, int64_t bucket) {
  const Parts of = parts_of(n, parts);
  const simt::Buffer<T> x(simt::as<T>(simt::data(simt::Kind::wild, n)), 1);
  const int64_t* const replays = simt::replays_for(parts);
  std::vector<std::pair<int64_t, int64_t>> vectors;  // their first elements and lengths
  for (int64_t part = 0; part < parts; ++part) {
    vectors.push_back({of.begin(part), of.length(part)});
    if (n % 2) vectors.push_back({of.begin(part) / 2, of.length(part) / (part % 3 + 1) * (part % 2)});
  }
  const int64_t longest = of.length(0), count = int64_t(vectors.size());
  const int64_t stride = ((longest + bucket - 1) / bucket * 4 + (longest * bits + 7) / 8 + 3) / 4;  // of floats
  const simt::Buffer<float> expected(count * stride), on_cpu(count * stride), got(count * stride), expected_most(count),
      most_on_cpu(count), most(count);
  const auto sources = [&](const simt::Buffer<float>& to) {
    std::vector<QuantizeSource> table;
    for (const auto& [begin, length] : vectors) {
      float* const norms = to + int64_t(table.size()) * stride;
      auto* const levels = reinterpret_cast<uint8_t*>(norms + (length + bucket - 1) / bucket);
      table.push_back({x + begin, length, uint64_t(table.size()) << 40 | 5u, levels, norms});
    }
    return table;
  };
  const int dtype = dtype_of(x);
  const auto each = sources(expected), together = sources(on_cpu), on_device = sources(got);
  for (int64_t i = 0; i < count; ++i)
    cpu::quantize_packed(&each[size_t(i)], 1, dtype, bits, bucket, 0, replays, expected_most + i, 1);
  cpu::quantize_packed(together.data(), count, dtype, bits, bucket, 0, replays, most_on_cpu, 2);
  simt::expect_equal(on_cpu.get(), expected.get(), count * stride, "quantize_packed of vectors on the CPU");
  simt::expect_equal(most_on_cpu.get(), expected_most.get(), count, "quantize_packed of vectors on the CPU: most");
  simt::call(cuda::quantize_packed, on_device.data(), count, dtype, bits, bucket, 0, replays, most);
  simt::expect_equal(got.get(), expected.get(), count * stride, "quantize_packed of vectors");
  simt::expect_equal(most.get(), expected_most.get(), count, "quantize_packed of vectors: most");
}

// More terms than one launch takes, and none.
static void test_many(int64_t count) {
  const int64_t n = 100;
  const simt::Buffer<float> x(simt::data(simt::Kind::normal, n)), norms(4), expected(n), got(n);
  const simt::Buffer<uint8_t> packed(n / 2);
  const QuantizeSource source{x, n, 7, packed, norms};
  cpu::quantize_packed(&source, 1, 0, 4, 32, 0, nullptr, nullptr, 1);
  const std::vector<QuantizedTerm> terms(size_t(count), {packed, norms});
  int32_t failed = 0;
  cpu::quantize_decode_sum(terms.data(), count, 1, n, 4, 32, 0.1f, false, expected, 0, &failed, 1);
  cuda::quantize_decode_sum(terms.data(), count, 1, n, 4, 32, 0.1f, false, got, 0, &failed, nullptr);
  simt::expect_equal(got.get(), expected.get(), n, "quantize_decode_sum of many terms");
  simt::expect_equal(failed, 0, "quantize_decode_sum of many terms: failed");
}

// Parts of one length or two, more of them than a launch takes, with several terms each.
template <class T>
static void test_parts(int64_t n, int64_t parts, int64_t count, int64_t bucket, bool add) {
  const Parts of = parts_of(n, parts);
  const int64_t longest = of.length(0), nbytes = (longest * 5 + 7) / 8, buckets = (longest + bucket - 1) / bucket;
  const simt::Buffer<float> x(simt::data(simt::Kind::normal, longest * parts * count)), norms(buckets * parts * count);
  const simt::Buffer<uint8_t> packed(nbytes * parts * count);
  const simt::Buffer<T> expected(simt::as<T>(simt::data(simt::Kind::normal, n))),
      got(simt::as<T>(simt::data(simt::Kind::normal, n)), n % 3);
  std::vector<QuantizedTerm> terms;
  int32_t failed = 0;
  for (int64_t p = 0; p < parts; ++p) {
    for (int64_t t = p * count; t < (p + 1) * count; ++t) {
      const QuantizeSource source{x + t * longest, of.length(p), uint64_t(t), packed + t * nbytes, norms + t * buckets};
      terms.push_back({source.packed, source.norms});
      cpu::quantize_packed(&source, 1, 0, 5, bucket, 0, nullptr, nullptr, 1);
    }
    cpu::quantize_decode_sum(terms.data() + p * count, count, 1, of.length(p), 5, bucket, 0.3f, add,
                             expected + of.begin(p), dtype_of(got), &failed, 1);
  }
  const simt::Buffer<T> on_cpu(simt::as<T>(simt::data(simt::Kind::normal, n)));
  cpu::quantize_decode_sum(terms.data(), count, parts, n, 5, bucket, 0.3f, add, on_cpu, dtype_of(got), &failed, 1);
  simt::expect_equal(on_cpu.get(), expected.get(), n, "quantize_decode_sum in parts on the CPU");
  cuda::quantize_decode_sum(terms.data(), count, parts, n, 5, bucket, 0.3f, add, got, dtype_of(got), &failed, nullptr);
  simt::expect_equal(got.get(), expected.get(), n, "quantize_decode_sum in parts");
  simt::expect_equal(failed, 0, "quantize_decode_sum in parts: failed");
  norms[buckets * count * (parts - 1)] = -1.0f;
  cpu::quantize_decode_sum(terms.data(), count, parts, n, 5, bucket, 0.3f, add, on_cpu, dtype_of(got), &failed, 1);
  simt::expect_equal(failed, int32_t(count * (parts - 1) + 1),
                     "quantize_decode_sum in parts: number of a corrupt term");
}

int main() {
  for (int64_t n : {7, 4096, 20001})
    test_parts<float>(n, 7, 1, 32, false), test_parts<BFloat16>(n, 3, 2, 512, false),
        test_parts<float>(n, 3, 2, 7, true);
  if (!simt::kRaces) test_parts<float>(2003, 250, 1, 512, false), test_parts<float>(300, 3, 100, 32, true);
  for (int64_t bucket : {int64_t(100), int64_t(5000)})
    test_vectors<float>(10001, 2, 4, bucket), test_vectors<BFloat16>(10002, 3, 9, bucket);
  test_vectors<float>(27001, 3, 4, 8500);
  if (!simt::kRaces) {
    test_vectors<float>(8191, 250, 5, 7), test_vectors<Float16>(60000, 240, 4, 5000), test_vectors<float>(5, 9, 4, 512);
    test_many(0), test_many(500);
  }
  for (int64_t n : {1, 33, 8193, 20001})
    for (int64_t bucket : {int64_t(7), int64_t(512), int64_t(5000)})
      for (int bits : {4, 9}) test_half<BFloat16>(n, bits, bucket, n % 2), test_half<Float16>(n, bits, bucket, n % 2);
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      for (int64_t bucket : kBuckets) {
        const bool few = kind == simt::Kind::wild || (kind == simt::Kind::normal && bucket == 512);
        if (n > 10000 ? bucket != (n > 70000 ? 40000 : 1001) || kind != simt::Kind::wild : n > 2000 && !few) continue;
        for (int norm : {0, 1})
          for (int bits : {2, 4, 5, 8, 9, 16})
            if (bits == 4 || (n < 2000 && (bucket + n + bits) % 3 == norm)) test(x, n, bits, bucket, norm);
      }
    }
  }
}
