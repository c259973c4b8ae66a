// range_float_fit, range_float_encode, range_float_encode_packed, range_float_decode and range_float_decode_packed.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/range_float.cu"

using namespace gradzip;

static void test_fit(const simt::Buffer<float>& x, int64_t n, int bits, int mantissa, float vmin, float vmax) {
  RangeFloat expected;
  const RangeFit on_cpu{&expected, x, n};
  cpu::range_float_fit(&on_cpu, 1, bits, mantissa, vmin, vmax, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<RangeFloat> format(1);
    const RangeFit fit{format, x, n};
    simt::call(cuda::range_float_fit, &fit, 1, bits, mantissa, vmin, vmax);
    simt::expect_equal(*format.get(), expected, "range_float_fit, bits = " + std::to_string(bits));
  });
}

static void test_encode(const simt::Buffer<float>& x, int64_t n, int bits, bool stochastic) {
  RangeFloat number;
  const RangeFit fit{&number, x, n};
  cpu::range_float_fit(&fit, 1, bits, -1, -0.7f, 1.5f, 1);
  if (number.positive + number.negative >= 1u << bits)
    std::fprintf(stderr, "codes of more than N bits\n"), std::exit(1);
  const simt::Buffer<RangeFloat> format(std::vector<RangeFloat>{number});
  const int64_t nbytes = (n * bits + 7) / 8;
  const simt::Buffer<int32_t> expected(n);
  const simt::Buffer<uint8_t> expected_packed(nbytes);
  const simt::Buffer<float> expected_values(n);
  const int64_t* const replays = simt::replays_for(n);
  int64_t out = 0, out_packed = 5;  // which grows
  int32_t refused = 0;
  cpu::range_float_encode(&number, x, n, stochastic, 42, expected, &out, 1);
  const RangeSource on_cpu{&number, x, n, 42, expected_packed, &out_packed};
  cpu::range_float_encode_packed(&on_cpu, 1, bits, stochastic, replays, 1);
  cpu::range_float_decode(&number, expected, n, expected_values, &refused, 1);
  simt::expect_equal(out_packed, 5 + out, "range_float_encode_packed on the CPU: outside");
  simt::expect_equal(refused, 0, "range_float_decode on the CPU: failed");
  simt::in_any_order(n, [&] {
    const simt::Buffer<int32_t> codes(n, n % 2), failed(std::vector<int32_t>{0});
    const simt::Buffer<int64_t> outside(1);
    cuda::range_float_encode(format, x, n, stochastic, 42, codes, outside, nullptr);
    simt::expect_equal(codes.get(), expected.get(), n, "range_float_encode");
    simt::expect_equal(*outside.get(), out, "range_float_encode: outside");
    const simt::Buffer<uint8_t> packed(nbytes, n % 4);
    const RangeSource source{format, x, n, 42, packed, outside};
    cuda::range_float_encode_packed(&source, 1, bits, stochastic, replays, nullptr);
    simt::expect_equal(packed.get(), expected_packed.get(), nbytes, "range_float_encode_packed");
    simt::expect_equal(*outside.get(), 2 * out, "range_float_encode_packed: outside");
    const simt::Buffer<float> values(n);
    cuda::range_float_decode(&number, codes, n, values, failed, nullptr);
    simt::expect_equal(values.get(), expected_values.get(), n, "range_float_decode");
    simt::expect_equal(*failed.get(), 0, "range_float_decode: failed");
    const simt::Buffer<uint8_t> wire(8, n % 8);
    const uint64_t word = range_wire(number);
    std::memcpy(wire.get(), &word, 8);
    cpu::pack_bits(expected, n, bits, packed, 1);  // drawn without replays
    for (const bool valid : {true, false}) {
      *failed.get() = 0;
      if (!valid) wire[7] = uint8_t(bits + 1);
      const RangeCodes of{wire, packed, n, values};
      cuda::range_float_decode_packed(&of, 1, bits, failed, nullptr);
      simt::expect_equal(*failed.get(), int32_t(!valid), "range_float_decode_packed: failed");
      if (valid) simt::expect_equal(values.get(), expected_values.get(), n, "range_float_decode_packed");
      for (int64_t i = 0; !valid && i < n; ++i)
        if (!std::isnan(values[i])) std::fprintf(stderr, "an invalid format gives a number\n"), std::exit(1);
    }
    *failed.get() = 0;
    if (n == 0) return;
    codes[n - 1] = int32_t(number.positive + number.negative + 1);
    cuda::range_float_decode(&number, codes, n, values, failed, nullptr);
    simt::expect_equal(*failed.get(), 1, "range_float_decode of a code there is not: failed");
    simt::expect_equal(std::isnan(values[n - 1]), true, "range_float_decode of a code there is not");
  });
}

// More tensors than a launch takes, of different sizes.
static void test_several(int bits, int mantissa, bool stochastic) {
  constexpr int64_t kCount = cuda::kMostVectors + 5;
  std::vector<simt::Buffer<float>> xs;
  std::vector<simt::Buffer<uint8_t>> expected, packed;
  const simt::Buffer<RangeFloat> wanted(kCount), formats(kCount);
  int64_t out_there = 0;
  const simt::Buffer<int64_t> out(std::vector<int64_t>{0});
  std::vector<RangeFit> fits_there, fits;
  std::vector<RangeSource> there, sources;
  for (int64_t i = 0; i < kCount; ++i) {
    const int64_t n = i % 4 == 3 ? 9000 + i : i * i;
    xs.emplace_back(simt::data(simt::kKinds[size_t(i) % std::size(simt::kKinds)], n), i % 4);
    expected.emplace_back((n * bits + 7) / 8);
    packed.emplace_back((n * bits + 7) / 8, i % 4);
    fits_there.push_back({wanted + i, xs.back(), n});
    fits.push_back({formats + i, xs.back(), n});
    there.push_back({wanted + i, xs.back(), n, 7 + uint64_t(i), expected.back(), &out_there});
    sources.push_back({formats + i, xs.back(), n, 7 + uint64_t(i), packed.back(), out});
  }
  cpu::range_float_fit(fits_there.data(), kCount, bits, mantissa, -0.5f, 0.5f, 2);
  cpu::range_float_encode_packed(there.data(), kCount, bits, stochastic, nullptr, 2);
  simt::call(cuda::range_float_fit, fits.data(), kCount, bits, mantissa, -0.5f, 0.5f);
  simt::expect_equal(formats.get(), wanted.get(), kCount, "range_float_fit of several");
  cuda::range_float_encode_packed(sources.data(), kCount, bits, stochastic, nullptr, nullptr);
  for (size_t i = 0; i < packed.size(); ++i)
    simt::expect_equal(packed[i].get(), expected[i].get(), packed[i].size(), "range_float_encode_packed of several");
  simt::expect_equal(*out.get(), out_there, "range_float_encode_packed of several: outside");
}

// More bit streams than a launch takes; of one of each launch, the last code does not exist.
static void test_decode_several(int bits) {
  constexpr int64_t kCount = cuda::kRangeCodes + 5;
  std::vector<simt::Buffer<uint8_t>> wires, streams;
  std::vector<simt::Buffer<float>> wanted, got;
  std::vector<RangeCodes> there, here;
  for (int64_t i = 0; i < kCount; ++i) {
    const int64_t n = i == 3 ? 9001 : i % 7 * i;
    const RangeFloat number = make_range_float(bits, 1 + int(i) % bits, -0.5f * float(i % 2), 1.5f);
    const uint32_t last = number.positive + number.negative;
    std::vector<int32_t> codes(size_t(n), 0);
    for (int64_t j = 0; j < n; ++j) codes[size_t(j)] = int32_t(uint32_t(j * 7919 + i) % (last + 1));
    if (n && (i == 50 || i == kCount - 1) && last + 1 < 1u << bits) codes.back() = int32_t(last + 1);
    const uint64_t word = range_wire(number);
    wires.emplace_back(8, i % 8);
    std::memcpy(wires.back().get(), &word, 8);
    streams.emplace_back((n * bits + 7) / 8, i % 5);
    cpu::pack_bits(codes.data(), n, bits, streams.back(), 1);
    wanted.emplace_back(n);
    got.emplace_back(n, i % 4);
    there.push_back({wires.back(), streams.back(), n, wanted.back()});
    here.push_back({wires.back(), streams.back(), n, got.back()});
  }
  int32_t failed_there = 0, failed = 0;
  cpu::range_float_decode_packed(there.data(), kCount, bits, &failed_there, 2);
  cuda::range_float_decode_packed(here.data(), kCount, bits, &failed, nullptr);
  simt::expect_equal(failed, int32_t(failed_there > 0), "range_float_decode_packed of several: failed");
  for (int64_t i = 0; i < kCount; ++i) {
    const bool corrupt = failed_there && (i == 50 || i == kCount - 1);
    const int64_t n = here[size_t(i)].n - (corrupt ? 1 : 0);
    simt::expect_equal(got[size_t(i)].get(), wanted[size_t(i)].get(), n, "range_float_decode_packed of several");
    if (corrupt) simt::expect_equal(std::isnan(got[size_t(i)][n]), true, "a code there is not, of several");
  }
  cuda::range_float_decode_packed(here.data(), kCount, bits, nullptr, nullptr);
}

int main() {
  test_several(8, -1, false);
  test_several(5, 2, true);
  for (int bits : {2, 7, 16}) test_decode_several(bits);
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      for (int bits : {2, 5, 8, 10, 16}) {
        if (n > 10000 && bits != 10) continue;
        // CPU and CUDA agree on infinite limits, too, although no format has them.
        test_fit(x, n, bits, -1, 1.0f, -1.0f);
        test_fit(x, n, bits, bits / 2, 1.0f, -1.0f);
        test_fit(x, n, bits, -1, -0.5f, 2.0f);
        test_fit(x, n, bits, -1, 0.0f, 2.0f);
        for (bool stochastic : {false, true})
          if (n < 50000 || kind == simt::Kind::normal) test_encode(x, n, bits, stochastic);
      }
    }
  }
  // Large enough for the histogram to be that of a sample.
  const int64_t n = (1 << 19) + 4321;
  test_fit(simt::Buffer<float>(simt::data(simt::Kind::normal, n)), n, 10, -1, 1.0f, -1.0f);
}
