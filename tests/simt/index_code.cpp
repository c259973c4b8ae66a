// marked_indices, encode_indices, decode_indices and sparse_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/index_code.cu"
#include "cuda/marked_indices.cu"

using namespace gradzip;

using Bytes = simt::Buffer<uint8_t>;
using Indices = simt::Buffer<int32_t>;
using Floats = simt::Buffer<float>;

static void test_marked(int64_t n, const std::vector<int32_t>& indices) {
  const int64_t count = int64_t(indices.size());
  const Bytes bits((n + 7) / 8, n % 4);
  if (n) std::memset(bits.get(), 0, size_t(bits.size()));
  for (int32_t i : indices) bits[i / 8] |= uint8_t(1 << i % 8);
  const Floats x(simt::data(simt::Kind::wild, n)), expected(count);
  const Indices where(count);
  cpu::marked_indices(bits, n, x, count, where, expected, 1);
  simt::in_any_order(n, [&] {
    const auto scratch = simt::workspace(cuda::marked_indices_workspace(n));
    const Indices got(count), untouched(count + 1), more(count + 1), alone(count);
    const Floats values(count);
    const simt::Buffer<int64_t> set(1);
    cuda::marked_indices(bits, n, x, count, got, values, set, scratch.get(), nullptr);
    simt::expect_equal(got.get(), where.get(), count, "marked_indices");
    simt::expect_equal(values.get(), expected.get(), count, "marked_indices: values");
    simt::expect_equal(*set.get(), count, "marked_indices: set bits");
    cuda::marked_indices(bits, n, nullptr, count, alone, nullptr, set, scratch.get(), nullptr);
    simt::expect_equal(alone.get(), where.get(), count, "marked_indices without values");
    cuda::marked_indices(bits, n, nullptr, count + 1, more, nullptr, set, scratch.get(), nullptr);
    simt::expect_equal(more.get(), untouched.get(), count + 1, "marked_indices of another count");
    cuda::count_marked(bits, n, set, scratch.get(), nullptr);
    simt::expect_equal(*set.get(), count, "count_marked");
  });
}

static int64_t encode(const Indices& indices, int64_t numel, const Bytes& out) {
  const int64_t count = indices.size();
  const simt::Buffer<int64_t> nbytes(1);
  cuda::encode_indices(indices, count, numel, out, out.size(), nbytes,
                       simt::workspace(cuda::encode_indices_workspace(count)).get(), nullptr);
  return *nbytes.get();
}

// Whatever the bytes, both say the same of them, and read and write nothing else.
static void test_decode(const Bytes& stream, int64_t numel, int64_t count, bool sound = false) {
  const int64_t nbytes = stream.size();
  const Indices expected(count);
  const Floats values(simt::data(simt::Kind::normal, count)), sum(simt::data(simt::Kind::sparse, numel));
  const bool corrupt = cpu::decode_indices(stream, nbytes, numel, count, expected, 1) != 0;
  if (!corrupt) cpu::sparse_decode_add(stream, nbytes, values, count, 0.3f, sum, numel, 1);
  const auto compare = [&] {
    const auto scratch = simt::workspace(cuda::sparse_decode_add_workspace(numel));
    const Indices got(count);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0, 0});
    cuda::decode_indices(stream, nbytes, numel, count, got, failed, scratch.get(), nullptr);
    const Floats out(simt::data(simt::Kind::sparse, numel));
    cuda::sparse_decode_add(stream, nbytes, values, count, 0.3f, out, numel, failed + 1, scratch.get(), nullptr);
    simt::expect_equal(failed[0], int32_t(corrupt), "decode_indices: failed");
    simt::expect_equal(failed[1], int32_t(corrupt), "sparse_decode_add: failed");
    if (!corrupt) simt::expect_equal(got.get(), expected.get(), count, "decode_indices");
    if (!corrupt) simt::expect_equal(out.get(), sum.get(), numel, "sparse_decode_add");
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
  const int64_t nbytes = cpu::encoded_indices_nbytes(indices, count, numel, 1);
  const Bytes expected(nbytes, numel % 4);
  cpu::encode_indices(indices, count, numel, expected, nbytes, 1);
  simt::in_any_order(numel, [&] {
    const Bytes out(nbytes, count % 5), small(nbytes - 1), untouched(nbytes - 1);
    simt::expect_equal(encode(indices, numel, out), nbytes, "encode_indices: nbytes");
    simt::expect_equal(out.get(), expected.get(), nbytes, "encode_indices");
    simt::expect_equal(encode(indices, numel, small), nbytes, "encode_indices without room: nbytes");
    simt::expect_equal(small.get(), untouched.get(), nbytes - 1, "encode_indices without room");
    simt::expect_equal(encode(indices, numel, Bytes(0)), nbytes, "encode_indices: nbytes alone");
  });
  test_decode(expected, numel, count, true);
  if (numel > 70000) return;

  for (int spoilt = 0; spoilt < (numel > 5000 ? 8 : 32) / (simt::kLong ? 1 : 2); ++spoilt) {
    std::vector<uint8_t> bytes(expected.get(), expected.get() + nbytes);
    const size_t most = spoilt % 4 ? std::min<size_t>(bytes.size(), 48) : bytes.size();  // headers and tables above all
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
      std::fprintf(stderr, "encode_indices takes %d at %lld\n", value, (long long)at), std::exit(1);
  }
}

int main() {
  std::mt19937 random(7);
  for (int64_t n : {0, 1, 7, 8, 33, 1000, 8192, 8193, 65537, 300001})
    for (unsigned one_in : {1, 2, 6, 100, 5000}) {
      if (n > 70000 && !simt::kLong) continue;
      std::vector<int32_t> indices;
      for (int64_t i = 0; i < n; ++i)
        if (random() % one_in == 0) indices.push_back(int32_t(i));
      if (n < 70000) test_marked(n, indices);
      test_stream(n, indices, random);
    }
  // Clusters, for which blocks choose different k, and the largest gaps there are.
  std::vector<int32_t> clusters;
  for (int32_t c = 0; c < 5; ++c)
    for (int32_t i = 0; i < 1500; ++i) clusters.push_back(c * 13000 + i * (1 + c % 2));
  test_stream(65536, clusters, random);
}
