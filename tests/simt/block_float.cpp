// block_float_encode and block_float_decode.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/block_float.cu"

using namespace gradzip;

// Below, at and above what a warp keeps in registers.
static const int64_t kBlocks[] = {32, 160, 256, 288, 4096};

static void expect_close(const float* got, const float* expected, int64_t n, const std::string& what) {
  for (int64_t i = 0; i < n; ++i)  // the bits of NaNs may differ
    if (!(std::isnan(got[i]) && std::isnan(expected[i]))) simt::expect_equal(got[i], expected[i], what);
}

static void test(const simt::Buffer<float>& x, int64_t n, int bits, int64_t block, bool stochastic, int64_t shards) {
  const std::string what = "bits = " + std::to_string(bits) + ", block = " + std::to_string(block);
  const int64_t of_shard = (n + block * shards - 1) / (block * shards), blocks = of_shard * shards;
  const int64_t nbytes = blocks * block_float_nbytes(bits, block);
  const uint64_t keys[] = {5, 6};
  const int64_t* const replays = simt::replays_for(n);
  const simt::Buffer<float> residual(simt::data(simt::Kind::normal, n), 1);
  const simt::Buffer<float> expected_error(n), expected_alone(n), expected_values(n), expected_sum(n);
  const simt::Buffer<uint8_t> expected(nbytes), alone(nbytes);
  cpu::block_float_encode(x, 0, residual, 1, n, blocks, bits, block, stochastic ? &keys[0] : nullptr, replays,
                          expected_error, expected, 1);
  cpu::block_float_encode(x, 0, nullptr, 1, n, blocks, bits, block, stochastic ? &keys[1] : nullptr, replays, nullptr,
                          alone, 1);
  std::vector<const uint8_t*> parts, pairs;
  for (int64_t k = 0; k < shards; ++k) {
    parts.push_back(expected + k * nbytes / shards);
    pairs.insert(pairs.end(), {parts.back(), alone + k * nbytes / shards});
  }
  cpu::block_float_decode(parts.data(), shards, 1, of_shard, n, bits, block, 1.0f, nullptr, expected_values, 0, 1);
  cpu::block_float_decode(pairs.data(), shards, 2, of_shard, n, bits, block, 0.3f, residual, expected_sum, 0, 1);
  simt::in_any_order(n, [&] {
    // A payload begins at a multiple of 4.
    const simt::Buffer<uint32_t> payload(nbytes / 4, n % 4);
    auto* const bytes = reinterpret_cast<uint8_t*>(payload.get());
    const simt::Buffer<float> error(n, n % 3), in_place(std::vector<float>(x.get(), x.get() + n), n % 2);
    cuda::block_float_encode(x, 0, residual, 1, n, blocks, bits, block, stochastic ? &keys[0] : nullptr, replays, error,
                             bytes, nullptr);
    simt::expect_equal(bytes, expected.get(), nbytes, "block_float_encode, " + what);
    simt::expect_equal(error.get(), expected_error.get(), n, "block_float_encode: error, " + what);
    cuda::block_float_encode(in_place, 0, residual, 1, n, blocks, bits, block, stochastic ? &keys[0] : nullptr, replays,
                             in_place, bytes, nullptr);
    simt::expect_equal(bytes, expected.get(), nbytes, "block_float_encode in place, " + what);
    simt::expect_equal(in_place.get(), expected_error.get(), n, "block_float_encode in place: error, " + what);
    const simt::Buffer<uint32_t> other(nbytes / 4);
    auto* const other_bytes = reinterpret_cast<uint8_t*>(other.get());
    cuda::block_float_encode(x, 0, nullptr, 1, n, blocks, bits, block, stochastic ? &keys[1] : nullptr, replays,
                             nullptr, other_bytes, nullptr);
    simt::expect_equal(other_bytes, alone.get(), nbytes, "block_float_encode without a residual, " + what);
    std::vector<const uint8_t*> of_parts, of_pairs;
    for (int64_t k = 0; k < shards; ++k) {
      of_parts.push_back(bytes + k * nbytes / shards);
      of_pairs.insert(of_pairs.end(), {of_parts.back(), other_bytes + k * nbytes / shards});
    }
    const simt::Buffer<float> values(n, n % 4), sum(std::vector<float>(residual.get(), residual.get() + n), n % 2);
    cuda::block_float_decode(of_parts.data(), shards, 1, of_shard, n, bits, block, 1.0f, nullptr, values, 0, nullptr);
    expect_close(values, expected_values, n, "block_float_decode, " + what);
    cuda::block_float_decode(of_pairs.data(), shards, 2, of_shard, n, bits, block, 0.3f, sum, sum, 0, nullptr);
    expect_close(sum, expected_sum, n, "block_float_decode: sum, " + what);
  });
}

// 16-bit floats in and out; the residual and the error are float32.
template <class T>
static void test_half(simt::Kind kind, int64_t n, int bits, int64_t block) {
  const int64_t blocks = (n + block - 1) / block, words = blocks * block_float_nbytes(bits, block) / 4;
  const uint64_t key = 5, *const keys = bits == 2 ? nullptr : &key;
  const simt::Buffer<T> x(simt::as<T>(simt::data(kind, n)), n % 4), expected_values(n), values(n, n % 3);
  const simt::Buffer<float> residual(simt::data(simt::Kind::ties, n)), expected_error(n), error(n, n % 2);
  const simt::Buffer<uint32_t> expected(words), payload(words);
  auto* const bytes = reinterpret_cast<uint8_t*>(payload.get());
  const int dtype = dtype_of(x);
  for (const float* of : {residual.get(), static_cast<float*>(nullptr)}) {
    cpu::block_float_encode(x, dtype, of, 1, n, blocks, bits, block, keys, nullptr, expected_error,
                            reinterpret_cast<uint8_t*>(expected.get()), 1);
    cuda::block_float_encode(x, dtype, of, 1, n, blocks, bits, block, keys, nullptr, error, bytes, nullptr);
    simt::expect_equal(payload.get(), expected.get(), words, "block_float_encode of 16-bit floats");
    simt::expect_equal(error.get(), expected_error.get(), n, "block_float_encode of 16-bit floats: error");
    const uint8_t* const payloads[] = {bytes, bytes};
    cpu::block_float_decode(payloads, 1, 2, blocks, n, bits, block, 0.3f, of, expected_values, dtype, 1);
    cuda::block_float_decode(payloads, 1, 2, blocks, n, bits, block, 0.3f, of, values, dtype, nullptr);
    simt::expect_equal(values.get(), expected_values.get(), n, "block_float_decode to 16-bit floats");
  }
}

// Rows with keys of their own, with and without a residual; more than one launch takes.
static void test_rows(int64_t rows, int64_t n, int bits, int64_t block) {
  const int64_t blocks = (n + block - 1) / block, words = blocks * block_float_nbytes(bits, block) / 4;
  const simt::Buffer<float> x(simt::data(simt::Kind::normal, rows * n), 1),
      residual(simt::data(simt::Kind::ties, rows * n)), expected_error(rows * n), error(rows * n);
  const simt::Buffer<uint32_t> expected(rows * words), alone(rows * words), got(rows * words);
  const auto bytes = [](uint32_t* from) { return reinterpret_cast<uint8_t*>(from); };
  const int64_t* const replays = simt::replays_for(n);
  std::vector<uint64_t> keys;
  for (int64_t row = 0; row < rows; ++row) {
    keys.push_back(uint64_t(row) << 40 | 5u);
    const uint64_t* const key = bits == 2 ? nullptr : &keys.back();
    cpu::block_float_encode(x + row * n, 0, residual + row * n, 1, n, blocks, bits, block, key, replays,
                            expected_error + row * n, bytes(expected + row * words), 1);
    cpu::block_float_encode(x + row * n, 0, nullptr, 1, n, blocks, bits, block, key, replays, nullptr,
                            bytes(alone + row * words), 1);
  }
  const uint64_t* const table = bits == 2 ? nullptr : keys.data();
  cuda::block_float_encode(x, 0, residual, rows, n, blocks, bits, block, table, replays, error, bytes(got), nullptr);
  simt::expect_equal(got.get(), expected.get(), rows * words, "block_float_encode of rows");
  simt::expect_equal(error.get(), expected_error.get(), rows * n, "block_float_encode of rows: error");
  cuda::block_float_encode(x, 0, nullptr, rows, n, blocks, bits, block, table, replays, nullptr, bytes(got), nullptr);
  simt::expect_equal(got.get(), alone.get(), rows * words, "block_float_encode of rows without a residual");
}

// More payloads than one launch takes, of one shard and of many.
static void test_many(int64_t count) {
  const int64_t n = 30 * count;
  const simt::Buffer<float> x(simt::data(simt::Kind::normal, n));
  const simt::Buffer<uint32_t> payload(9 * count);
  auto* const bytes = reinterpret_cast<uint8_t*>(payload.get());
  const uint64_t key = 5;
  cpu::block_float_encode(x, 0, nullptr, 1, n, count, 8, 32, &key, nullptr, nullptr, bytes, 1);
  std::vector<const uint8_t*> parts;
  for (int64_t i = 0; i < count; ++i) parts.push_back(bytes + 36 * i);
  const simt::Buffer<float> expected(n), expected_sum(32), got(n), sum(32);
  cpu::block_float_decode(parts.data(), count, 1, 1, n, 8, 32, 1.0f, nullptr, expected, 0, 1);
  cuda::block_float_decode(parts.data(), count, 1, 1, n, 8, 32, 1.0f, nullptr, got, 0, nullptr);
  simt::expect_equal(got.get(), expected.get(), n, "block_float_decode of many shards");
  cpu::block_float_decode(parts.data(), 1, count, 1, 32, 8, 32, 0.1f, nullptr, expected_sum, 0, 1);
  cuda::block_float_decode(parts.data(), 1, count, 1, 32, 8, 32, 0.1f, nullptr, sum, 0, nullptr);
  simt::expect_equal(sum.get(), expected_sum.get(), 32, "block_float_decode of many payloads");
}

int main() {
  for (int64_t n : {1, 33, 8193, 20001})
    for (simt::Kind kind : {simt::Kind::normal, simt::Kind::wild})
      for (int bits : {2, 4, 8}) test_half<BFloat16>(kind, n, bits, 256), test_half<Float16>(kind, n, bits, 288);
  for (int64_t n : simt::kSizes)
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      for (int64_t block : kBlocks)
        for (int bits : {2, 4, 8}) {
          const bool few = block == (n > 70000 ? 256 : 288) && kind == simt::Kind::wild;
          if (n < 2000 || (n < 10000 && kind == simt::Kind::wild) || few)
            test(x, n, bits, block, bits > 2 && (n + block / 32 + bits / 4) % 3 > 0, 1 + n % 3);
        }
    }
  for (int bits : {2, 4, 8}) test_rows(3, 1001, bits, 288);
  if (!simt::kRaces) test_rows(600, 33, 8, 32), test_many(600);
}
