// index_code_encode, index_code_decode and index_code_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/index_code.cu"

using namespace gradzip;

using Bytes = simt::Buffer<uint8_t>;
using Indices = simt::Buffer<int32_t>;
using Floats = simt::Buffer<float>;

static int64_t encode(const Indices& indices, int64_t numel, const Bytes& out) {
  const int64_t count = indices.size();
  const simt::Buffer<int64_t> nbytes(1);
  simt::call(cuda::index_code_encode, indices, count, numel, out, out.size(), nbytes);
  return *nbytes.get();
}

// For any bytes, CPU and CUDA agree on whether they are valid, and stay within bounds.
static void test_decode(const Bytes& stream, int64_t numel, int64_t count, bool sound = false) {
  const int64_t nbytes = stream.size();
  const Indices expected(count);
  const Floats values(simt::data(simt::Kind::normal, count)), sum(simt::data(simt::Kind::sparse, numel));
  int32_t corrupt = 0;
  cpu::index_code_decode(stream, nbytes, numel, count, expected, &corrupt, 1);
  if (!corrupt) cpu::index_code_decode_add(stream, nbytes, values, count, 0.3f, sum, numel, &corrupt, 1);
  const auto compare = [&] {
    const Indices got(count);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0, 0});
    simt::call(cuda::index_code_decode, stream, nbytes, numel, count, got, failed);
    const Floats out(simt::data(simt::Kind::sparse, numel));
    simt::call(cuda::index_code_decode_add, stream, nbytes, values, count, 0.3f, out, numel, failed + 1);
    simt::expect_equal(failed[0], corrupt, "index_code_decode: failed");
    simt::expect_equal(failed[1], corrupt, "index_code_decode_add: failed");
    if (!corrupt) simt::expect_equal(got.get(), expected.get(), count, "index_code_decode");
    if (!corrupt) simt::expect_equal(out.get(), sum.get(), numel, "index_code_decode_add");
    for (int64_t i = 0; corrupt && i < numel; ++i)
      if (!std::isnan(out[i])) std::fprintf(stderr, "a corrupt stream gives a number\n"), std::exit(1);
  };
  if (sound)
    simt::in_any_order(numel, compare);
  else
    compare();
}

static void test_stream(int64_t numel, const std::vector<int32_t>& list, std::mt19937& random) {
  const int64_t count = int64_t(list.size());
  const Indices indices(list, count % 3);
  int64_t nbytes, written;
  cpu::index_code_encode(indices, count, numel, nullptr, 0, &nbytes, 1);
  const Bytes expected(nbytes, numel % 4);
  cpu::index_code_encode(indices, count, numel, expected, nbytes, &written, 1);
  simt::expect_equal(written, nbytes, "index_code_encode on the CPU: nbytes");
  simt::in_any_order(numel, [&] {
    const Bytes out(nbytes, count % 5), small(nbytes - 1), untouched(nbytes - 1);
    simt::expect_equal(encode(indices, numel, out), nbytes, "index_code_encode: nbytes");
    simt::expect_equal(out.get(), expected.get(), nbytes, "index_code_encode");
    simt::expect_equal(encode(indices, numel, small), nbytes, "index_code_encode without room: nbytes");
    simt::expect_equal(small.get(), untouched.get(), nbytes - 1, "index_code_encode without room");
    simt::expect_equal(encode(indices, numel, Bytes(0)), nbytes, "index_code_encode: nbytes alone");
  });
  test_decode(expected, numel, count, true);
  for (int64_t padding : {1, 15, 16}) {
    std::vector<uint8_t> bytes(expected.get(), expected.get() + nbytes);
    bytes.resize(size_t(nbytes + padding));
    test_decode(Bytes(bytes), numel, count);
    int32_t corrupt = 0;
    cpu::index_code_decode(bytes.data(), nbytes + padding, numel, count, Indices(count), &corrupt, 1);
    simt::expect_equal(corrupt, int32_t(padding > 15), "index_code_decode of a padded stream");
  }
  if (numel > 70000) return;

  for (int spoilt = 0; spoilt < (simt::kRaces ? 4 : numel > 5000 ? 8 : 32) / (simt::kLong ? 1 : 2); ++spoilt) {
    std::vector<uint8_t> bytes(expected.get(), expected.get() + nbytes);
    const size_t most = spoilt % 4 ? std::min<size_t>(bytes.size(), 48) : bytes.size();  // mostly headers and tables
    for (int b = 0; b <= spoilt % 3; ++b) bytes[random() % most] = uint8_t(random() >> (random() % 9));
    test_decode(Bytes(bytes, spoilt % 4), numel, count);
  }
  for (int64_t shorter : {int64_t(1), int64_t(4), nbytes / 2, nbytes - 3}) {
    if (shorter > nbytes) continue;
    std::vector<uint8_t> bytes(expected.get(), expected.get() + nbytes - shorter);
    test_decode(Bytes(bytes), numel, count);
    if (bytes.size() < 12) continue;
    const uint32_t claim = uint32_t(bytes.size());
    std::memcpy(&bytes[8], &claim, 4);
    test_decode(Bytes(bytes), numel, count);
  }
  test_decode(expected, numel, count + 1);
  test_decode(expected, numel + 8, count);
  if (count < 2) return;
  for (const auto& [at, value] : {std::pair<int64_t, int32_t>{count - 1, int32_t(numel)},
                                  {0, -1},
                                  {count / 2, list[size_t(count / 2 - 1)]},
                                  {count - 1, -5}}) {
    std::vector<int32_t> wrong = list;
    wrong[size_t(at)] = value;
    if (encode(Indices(wrong), numel, Bytes(nbytes + 64)) != -1)
      std::fprintf(stderr, "index_code_encode takes %d at %lld\n", value, (long long)at), std::exit(1);
  }
}

int main() {
  std::mt19937 random(7);
  for (int64_t n : {0, 1, 7, 8, 33, 1000, 8192, 8193, 65537, 300001})
    for (unsigned one_in : {1, 2, 6, 100, 5000}) {
      if (!simt::kLong && (n > 70000 || (n > 10000 && one_in != 6))) continue;
      if (simt::kRaces && !(n == 65537 && one_in == 2) && !(n == 1000 && one_in == 6)) continue;
      std::vector<int32_t> indices;
      for (int64_t i = 0; i < n; ++i)
        if (random() % one_in == 0) indices.push_back(int32_t(i));
      test_stream(n, indices, random);
    }
  // Clusters, for which blocks choose different k, with the largest gaps.
  std::vector<int32_t> clusters;
  for (int32_t c = 0; c < 5; ++c)
    for (int32_t i = 0; i < 1500; ++i) clusters.push_back(c * 13000 + i * (1 + c % 2));
  test_stream(65536, clusters, random);
}
