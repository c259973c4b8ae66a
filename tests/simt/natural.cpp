// natural_encode and natural_decode_sum.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/natural.cu"

using namespace gradzip;

template <class T>
static void test(const simt::Buffer<T>& x, int64_t n) {
  const int dtype = dtype_of(x), kFloat = int(Dtype::float32);
  const int64_t nbytes = (n * kNaturalBits + 7) / 8;
  const simt::Buffer<uint8_t> expected(nbytes), other(nbytes);
  const simt::Buffer<T> expected_sum(n);
  const simt::Buffer<float> start(simt::data(simt::Kind::normal, n)), expected_added(simt::data(simt::Kind::normal, n));
  const int64_t* const replays = simt::replays_for(n);
  float expected_most = 1.0f;
  int32_t refused = 0;
  const NaturalSource on_cpu{x, n, 7, expected}, other_on_cpu{start, n, 8, other};
  cpu::natural_encode(&on_cpu, 1, dtype, replays, &expected_most, 1);
  cpu::natural_encode(&other_on_cpu, 1, kFloat, replays, nullptr, 1);
  const uint8_t* const payloads[] = {expected, other, expected};
  cpu::natural_decode_sum(payloads, 3, 1, n, 0.3f, false, expected_sum, dtype, &refused, 1);
  cpu::natural_decode_sum(payloads, 2, 1, n, 0.3f, true, expected_added, kFloat, &refused, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> packed(nbytes, n % 4), too(nbytes, 1);
    const simt::Buffer<T> sum(n, n % 3);
    const simt::Buffer<float> most(1), added(simt::data(simt::Kind::normal, n), n % 2);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    const NaturalSource source{x, n, 7, packed}, other_source{start, n, 8, too};
    cuda::natural_encode(&source, 1, dtype, replays, most, nullptr);
    simt::expect_equal(packed.get(), expected.get(), nbytes, "natural_encode");
    simt::expect_equal(*most.get(), expected_most, "natural_encode: most");
    cuda::natural_encode(&other_source, 1, kFloat, replays, nullptr, nullptr);
    simt::expect_equal(too.get(), other.get(), nbytes, "natural_encode without most");
    const uint8_t* const coded[] = {packed, too, packed};
    cuda::natural_decode_sum(coded, 3, 1, n, 0.3f, false, sum, dtype, failed, nullptr);
    simt::expect_equal(sum.get(), expected_sum.get(), n, "natural_decode_sum");
    cuda::natural_decode_sum(coded, 2, 1, n, 0.3f, true, added, kFloat, failed, nullptr);
    simt::expect_equal(added.get(), expected_added.get(), n, "natural_decode_sum onto other numbers");
    simt::expect_equal(*failed.get(), 0, "natural_decode_sum: failed");
    if (n == 0) return;
    packed[(n - 1) / 8 * kNaturalBits + (n - 1) % 8] = 0xff;  // all ones from the bit on where the last code begins
    packed[(n - 1) / 8 * kNaturalBits + (n - 1) % 8 + 1] = 0xff;
    cuda::natural_decode_sum(coded, 2, 1, n, 0.3f, false, sum, dtype, failed, nullptr);
    simt::expect_equal(*failed.get(), 1, "natural_decode_sum of an exponent of infinity: failed");
    simt::expect_equal(bool(std::isfinite(to_float(sum[n - 1]))), false,
                       "natural_decode_sum of an exponent of infinity");
  });
}

// Parts of a vector, of one length or two, and some of them again.
template <class T>
static void test_vectors(int64_t n, int64_t parts) {
  const Parts of = parts_of(n, parts);
  const simt::Buffer<T> x(simt::as<T>(simt::data(simt::Kind::wild, n)), 1);
  const int64_t* const replays = simt::replays_for(parts);
  const int64_t count = parts + parts / 2, nbytes = (of.length(0) * kNaturalBits + 7) / 8;
  const simt::Buffer<uint8_t> expected(count * nbytes), on_cpu(count * nbytes), got(count * nbytes);
  const simt::Buffer<float> expected_most(count), most_on_cpu(count), most(count);
  const auto sources = [&](uint8_t* to) {
    std::vector<NaturalSource> table;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t part = i < parts ? i : 2 * (i - parts);
      table.push_back({x + of.begin(part), of.length(part), uint64_t(i) << 40 | 5u, to + i * nbytes});
    }
    return table;
  };
  const int dtype = dtype_of(x);
  const auto each = sources(expected), together = sources(on_cpu), on_device = sources(got);
  for (int64_t i = 0; i < count; ++i) cpu::natural_encode(&each[size_t(i)], 1, dtype, replays, expected_most + i, 1);
  cpu::natural_encode(together.data(), count, dtype, replays, most_on_cpu, 2);
  simt::expect_equal(on_cpu.get(), expected.get(), count * nbytes, "natural_encode of vectors on the CPU");
  simt::expect_equal(most_on_cpu.get(), expected_most.get(), count, "natural_encode of vectors on the CPU: most");
  cuda::natural_encode(on_device.data(), count, dtype, replays, most, nullptr);
  simt::expect_equal(got.get(), expected.get(), count * nbytes, "natural_encode of vectors");
  simt::expect_equal(most.get(), expected_most.get(), count, "natural_encode of vectors: most");
}

// More payloads than one launch takes, and none.
static void test_many(int64_t count) {
  const int64_t n = 100;
  const simt::Buffer<float> x(simt::data(simt::Kind::normal, n)), expected(n), got(n);
  const simt::Buffer<uint8_t> packed((n * kNaturalBits + 7) / 8);
  const NaturalSource source{x, n, 7, packed};
  cpu::natural_encode(&source, 1, 0, nullptr, nullptr, 1);
  const std::vector<const uint8_t*> payloads(size_t(count), packed.get());
  int32_t failed = 0;
  cpu::natural_decode_sum(payloads.data(), count, 1, n, 0.1f, false, expected, 0, &failed, 1);
  cuda::natural_decode_sum(payloads.data(), count, 1, n, 0.1f, false, got, 0, &failed, nullptr);
  simt::expect_equal(got.get(), expected.get(), n, "natural_decode_sum of many payloads");
  simt::expect_equal(failed, 0, "natural_decode_sum of many payloads: failed");
}

// Parts of one length or two, more of them than a launch takes, with several payloads each.
template <class T>
static void test_parts(int64_t n, int64_t parts, int64_t count, bool add) {
  const Parts of = parts_of(n, parts);
  const int64_t longest = of.length(0), nbytes = (longest * kNaturalBits + 7) / 8;
  const simt::Buffer<float> x(simt::data(simt::Kind::normal, longest * parts * count));
  const simt::Buffer<uint8_t> packed(nbytes * parts * count);
  const simt::Buffer<T> expected(simt::as<T>(simt::data(simt::Kind::normal, n))),
      on_cpu(simt::as<T>(simt::data(simt::Kind::normal, n))),
      got(simt::as<T>(simt::data(simt::Kind::normal, n)), n % 3);
  const int dtype = dtype_of(got);
  std::vector<const uint8_t*> payloads;
  int32_t failed = 0;
  for (int64_t p = 0; p < parts; ++p) {
    for (int64_t t = p * count; t < (p + 1) * count; ++t) {
      const NaturalSource source{x + t * longest, of.length(p), uint64_t(t), packed + t * nbytes};
      payloads.push_back(source.packed);
      cpu::natural_encode(&source, 1, 0, nullptr, nullptr, 1);
    }
    cpu::natural_decode_sum(payloads.data() + p * count, count, 1, of.length(p), 0.3f, add, expected + of.begin(p),
                            dtype, &failed, 1);
  }
  cpu::natural_decode_sum(payloads.data(), count, parts, n, 0.3f, add, on_cpu, dtype, &failed, 1);
  simt::expect_equal(on_cpu.get(), expected.get(), n, "natural_decode_sum in parts on the CPU");
  cuda::natural_decode_sum(payloads.data(), count, parts, n, 0.3f, add, got, dtype, &failed, nullptr);
  simt::expect_equal(got.get(), expected.get(), n, "natural_decode_sum in parts");
  simt::expect_equal(failed, 0, "natural_decode_sum in parts: failed");
  std::fill_n(packed + nbytes * count * (parts - 1), 2, uint8_t(0xff));
  cpu::natural_decode_sum(payloads.data(), count, parts, n, 0.3f, add, on_cpu, dtype, &failed, 1);
  simt::expect_equal(failed, int32_t(count * (parts - 1) + 1),
                     "natural_decode_sum in parts: number of a corrupt payload");
}

int main() {
  for (int64_t n : {7, 4096, 20001})
    test_parts<float>(n, 7, 1, false), test_parts<BFloat16>(n, 3, 2, false), test_parts<float>(n, 3, 2, true);
  if (!simt::kRaces) test_parts<float>(2003, 500, 1, false), test_parts<float>(300, 3, 200, true);
  test_vectors<float>(20003, 3), test_vectors<BFloat16>(9001, 2);
  if (!simt::kRaces) test_vectors<Float16>(8193, 250), test_vectors<float>(5, 9), test_vectors<float>(1, 1);
  for (int64_t n : simt::kSizes)
    for (simt::Kind kind : simt::kKinds) {
      const std::vector<float> x = simt::data(kind, n);
      test(simt::Buffer<float>(x, n % 4), n);
      if (kind == simt::Kind::wild || n < 2000) {
        test(simt::Buffer<BFloat16>(simt::as<BFloat16>(x), n % 4), n);
        test(simt::Buffer<Float16>(simt::as<Float16>(x), n % 4), n);
      }
    }
  if (!simt::kRaces) test_many(0), test_many(1000);
}
