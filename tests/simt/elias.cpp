// elias_encode, elias_decode, elias_quantize and elias_decode_sum; invalid streams.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/bucket_norms.cu"
#include "cuda/elias.cu"

using namespace gradzip;

static int64_t capacity_of(int64_t n, int bits) { return (n + 4095) / 4096 * 3 + (n * (2 * bits - 1) + 7) / 8; }

static void test_codes(int64_t n, int top, int zeros) {
  const std::string what = "levels up to " + std::to_string(top) + ", 1 in " + std::to_string(zeros);
  std::mt19937 random(unsigned(n) + unsigned(top));
  const simt::Buffer<int32_t> codes(n);
  for (int64_t i = 0; i < n; ++i) {
    const int level = int(random() % unsigned(2 * top + 1)) - top;
    codes[i] = random() % unsigned(zeros) ? 0 : level;
  }
  const simt::Buffer<uint8_t> expected(capacity_of(n, 17));
  int64_t nbytes;
  cpu::elias_encode(codes, n, expected, expected.size(), &nbytes, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<int64_t> written(1);
    const simt::Buffer<uint8_t> out(nbytes, n % 4);
    simt::call(cuda::elias_encode, codes, n, out, nbytes, written);
    simt::expect_equal(*written.get(), nbytes, "elias_encode: nbytes, " + what);
    simt::expect_equal(out.get(), expected.get(), nbytes, "elias_encode, " + what);
    const simt::Buffer<int32_t> back(n), failed(std::vector<int32_t>{0});
    simt::call(cuda::elias_decode, out, nbytes, n, top, back, failed);
    simt::expect_equal(*failed.get(), 0, "elias_decode: failed, " + what);
    simt::expect_equal(back.get(), codes.get(), n, "elias_decode, " + what);
    if (n == 0) return;
    const simt::Buffer<uint8_t> small(nbytes - 1);
    simt::call(cuda::elias_encode, codes, n, small, nbytes - 1, written);
    simt::expect_equal(*written.get(), int64_t(-2), "elias_encode beyond the capacity");
    const int32_t kept = codes[n / 2];
    for (int32_t beyond : {65536, INT32_MIN}) {
      if (n > 5000) break;
      codes[n / 2] = beyond;
      const simt::Buffer<uint8_t> out(capacity_of(n, 17));
      simt::call(cuda::elias_encode, codes, n, out, out.size(), written);
      simt::expect_equal(*written.get(), int64_t(-1), "elias_encode of a level there is no code for");
    }
    codes[n / 2] = kept;
  });
}

static void test_quantize(const simt::Buffer<float>& x, int64_t n, int bits, int64_t bucket, int norm) {
  bucket = std::min(bucket, std::max<int64_t>(1, n));
  const std::string what = "bits = " + std::to_string(bits) + ", bucket = " + std::to_string(bucket);
  const int64_t buckets = (n + bucket - 1) / bucket;
  const simt::Buffer<uint8_t> expected(capacity_of(n, bits));
  const simt::Buffer<float> expected_norms(buckets), expected_sum(simt::data(simt::Kind::normal, n));
  const simt::Buffer<float> expected_many(n);
  int64_t nbytes;
  int32_t refused = 0;
  cpu::elias_quantize(x, n, bits, bucket, norm, 9, expected, expected.size(), expected_norms, &nbytes, 1);
  const EliasTerm term{expected, nbytes, expected_norms};
  // As many as a lane can have; of long vectors, as many as a row of chunks can have.
  const std::vector<EliasTerm> many(n < 2000 ? 1 + size_t(n) % 33 : 5, term);
  cpu::elias_decode_sum(&term, 1, n, bits, bucket, 0.3f, true, expected_sum, &refused, 1);
  cpu::elias_decode_sum(many.data(), int64_t(many.size()), n, bits, bucket, 0.3f, false, expected_many, &refused, 1);
  simt::expect_equal(refused, 0, "elias_decode_sum on the CPU: failed");
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> out(nbytes, n % 4);
    const simt::Buffer<float> norms(buckets), sum(simt::data(simt::Kind::normal, n), n % 3), sum_of_many(n);
    const simt::Buffer<int64_t> written(1);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    simt::call(cuda::elias_quantize, x, n, bits, bucket, norm, 9, out, nbytes, norms, written);
    simt::expect_equal(*written.get(), nbytes, "elias_quantize: nbytes, " + what);
    simt::expect_equal(norms.get(), expected_norms.get(), buckets, "elias_quantize: norms, " + what);
    simt::expect_equal(out.get(), expected.get(), nbytes, "elias_quantize, " + what);
    const EliasTerm coded{out, nbytes, norms};
    std::vector<EliasTerm> terms(many.size(), coded);
    simt::call(cuda::elias_decode_sum, &coded, 1, n, bits, bucket, 0.3f, true, sum, failed);
    simt::expect_equal(sum.get(), expected_sum.get(), n, "elias_decode_sum onto other numbers, " + what);
    simt::call(cuda::elias_decode_sum, terms.data(), int64_t(terms.size()), n, bits, bucket, 0.3f, false, sum_of_many,
               failed);
    simt::expect_equal(sum_of_many.get(), expected_many.get(), n, "elias_decode_sum, " + what);
    simt::expect_equal(*failed.get(), 0, "elias_decode_sum: failed, " + what);
    if (n == 0) return;
    norms[buckets - 1] = -1.0f;
    terms.insert(terms.begin(), term);
    simt::call(cuda::elias_decode_sum, terms.data(), int64_t(terms.size()), n, bits, bucket, 0.3f, false, sum, failed);
    simt::expect_equal(*failed.get(), 1, "elias_decode_sum of a norm there is not: failed");
    for (int64_t i = 0; i < n; ++i)
      simt::expect_equal(std::isnan(sum[i]), i >= (buckets - 1) * bucket, "elias_decode_sum of a norm there is not");
  });
}

// Streams with changed, missing or additional bytes: CPU and CUDA agree on which are valid, and the sanitizer checks
// all accesses.
static void test_hostile(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> codes(static_cast<size_t>(n));
  for (auto& code : codes) code = random() % 3 ? 0 : int32_t(random() % 15) - 7;
  std::vector<uint8_t> bytes(size_t(capacity_of(n, 17)));
  int64_t nbytes;
  cpu::elias_encode(codes.data(), n, bytes.data(), int64_t(bytes.size()), &nbytes, 1);
  bytes.resize(size_t(nbytes));
  const simt::Buffer<uint8_t> whole(bytes);
  switch (seed % 4) {
    case 0:
      bytes.resize(random() % (bytes.size() + 1));
      break;
    case 1:
      bytes.push_back(uint8_t(random()));
      break;
    case 2:
      for (auto& byte : bytes) byte = uint8_t(random());
      break;
    default:
      break;
  }
  for (unsigned i = 0; i < random() % 4 && !bytes.empty(); ++i)
    bytes[random() % std::min<size_t>(bytes.size(), i ? bytes.size() : 4)] = uint8_t(random());
  const simt::Buffer<uint8_t> stream(bytes, seed % 3);
  const simt::Buffer<float> norms(1), sum(simt::data(simt::Kind::normal, n));
  const simt::Buffer<int32_t> expected(n), back(n), failed(std::vector<int32_t>{0});
  int32_t refused = 0;
  cpu::elias_decode(stream, stream.size(), n, 7, expected, &refused, 1);
  simt::options.seed = seed;
  simt::call(cuda::elias_decode, stream, stream.size(), n, 7, back, failed);
  simt::expect_equal(*failed.get(), refused, "elias_decode of other bytes: failed, seed " + std::to_string(seed));
  if (!refused) simt::expect_equal(back.get(), expected.get(), n, "elias_decode of other bytes");
  *norms.get() = 1.0f;
  *failed.get() = 0;
  const EliasTerm good{whole, nbytes, norms}, other{stream, stream.size(), norms};
  std::vector<EliasTerm> terms(1 + seed % 7, good);
  terms[seed / 2 % terms.size()] = other;
  const int64_t count = int64_t(terms.size());
  simt::call(cuda::elias_decode_sum, terms.data(), count, n, 4, n, 1.0f, seed % 2 == 0, sum, failed);
  simt::expect_equal(*failed.get(), refused, "elias_decode_sum of other bytes: failed");
  bool spoilt = false;
  for (int64_t i = 0; i < n; ++i) spoilt |= std::isnan(sum[i]);
  simt::expect_equal(spoilt, refused != 0, "elias_decode_sum of other bytes: NaN");
  const simt::Buffer<float> on_cpu(simt::data(simt::Kind::normal, n));
  int32_t index = 0;
  cpu::elias_decode_sum(terms.data(), count, n, 4, n, 1.0f, seed % 2 == 0, on_cpu, &index, 1);
  simt::expect_equal(index, refused ? 1 + int32_t(seed / 2 % terms.size()) : 0, "elias_decode_sum: the invalid term");
  if (!refused) simt::expect_equal(sum.get(), on_cpu.get(), n, "elias_decode_sum of other bytes");
}

int main() {
  simt::Sizes sizes = simt::kSizes;
  for (int64_t n : {4095, 4096, 4097, 40000}) sizes.push_back(n);
  if (simt::kRaces) sizes = {300, 40000};
  for (int64_t n : sizes) {
    for (int zeros : {1, 4, 3000})
      for (int top : {1, 7, 65535})
        if ((n < 2000 && !simt::kRaces) || (n < 50000 && top == 7 && zeros == 4)) test_codes(n, top, zeros);
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      for (int64_t bucket : {int64_t(1), int64_t(64), int64_t(100), int64_t(512), int64_t(4096), int64_t(30000)})
        for (int bits : {2, 4, 8, 16})
          if (n < 2000 ? (bits + bucket + n) % 3 == 0
                       : bits == 4 && kind != simt::Kind::ties && n < 50000 &&
                             (bucket == 512 || (bucket == 30000 && kind == simt::Kind::wild)))
            test_quantize(x, n, bits, bucket, bits == 8);
    }
  }
  for (unsigned seed = 0; seed < (simt::kRaces ? 10 : 75); ++seed)
    test_hostile(seed % 5 ? 1 + seed * 7 % 900 : 4000 + seed * 30, seed);
}
