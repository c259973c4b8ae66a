// transform, transform_inverse, transform_select and transform_decode.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/abs_max.cu"
#include "cuda/transform.cu"

using namespace gradzip;

static uint32_t dct(int a, int b = 1, int c = 1) {
  return uint32_t(a - 1) << 8 | uint32_t(b - 1) << 16 | uint32_t(c - 1) << 24;
}
static uint32_t fourier(int log2) { return 1u | uint32_t(log2) << 8; }
constexpr uint32_t kPairs = 2;

// Once, in orders that alternate from call to call.
template <class F>
static void in_some_order(F f) {
  static unsigned calls = 0;
  simt::options.seed = ++calls % 2;
  simt::options.multiprocessors = calls % 2 ? 1 : 3;
  f();
}

// The bits are those of the CPU, except the signs of zeros; numbers that are not finite need only be so on both.
static void expect_close(const float* got, const float* expected, int64_t n, const std::string& what) {
  for (int64_t i = 0; i < n; ++i) {
    if (got[i] == expected[i] || (!std::isfinite(got[i]) && !std::isfinite(expected[i]))) continue;
    simt::expect_equal(got + i, expected + i, 1, what + ", element " + std::to_string(i) + " of " + std::to_string(n));
  }
}

static TransformLayout layout_of(uint32_t code, int64_t n) {
  TransformLayout t;
  if (!make_layout(code, n, &t)) std::fprintf(stderr, "no transform: %#x\n", code), std::exit(1);
  return t;
}

static std::string name(const char* what, uint32_t code, int64_t n) {
  return std::string(what) + " of " + std::to_string(n) + ", transform " + std::to_string(code);
}

static void test_transform(uint32_t code, int64_t n, simt::Kind kind) {
  const TransformLayout t = layout_of(code, n);
  const int64_t size = t.groups() * t.group;
  auto data = simt::data(kind, n, true);
  for (float& v : data) v *= 0x1p-16f;  // no sum overflows
  const simt::Buffer<float> x(data, n % 4), expected(size), back(n);
  cpu::transform(x, n, code, expected, 1);
  cpu::transform_inverse(expected, n, code, back, 1);
  in_some_order([&] {
    const simt::Buffer<float> coefficients(size, n % 3), elements(n, n % 2);
    cuda::transform(x, n, code, coefficients, nullptr);
    expect_close(coefficients, expected, size, name("transform", code, n));
    cuda::transform_inverse(expected, n, code, elements, nullptr);
    expect_close(elements, back, n, name("transform_inverse", code, n));
  });
}

// With scratch memory for all groups, or without.
template <class T = float>
static void test_select(uint32_t code, const std::vector<float>& data, int64_t k, const char* what, bool scratch,
                        bool finite = true) {
  const auto n = int64_t(data.size());
  const TransformLayout t = layout_of(code, n);
  const int64_t nbytes = (t.groups() + 7) / 8, room = scratch ? t.tiles * t.tile : 0;
  const simt::Buffer<T> x(simt::as<T>(data), n % 4);
  const simt::Buffer<float> values(k * t.group);
  const simt::Buffer<uint8_t> bitmap(nbytes);
  const TransformSource on_cpu{x, dtype_of(x), n, k, nullptr, 0, bitmap, values};
  cpu::transform_select(&on_cpu, 1, code, 1);
  const std::string title = name(what, code, n) + ", k = " + std::to_string(k);
  in_some_order([&] {
    const simt::Buffer<float> memory(room), got(k * t.group, n % 3);
    const simt::Buffer<uint8_t> bits(nbytes, n % 4);
    const TransformSource source{x, dtype_of(x), n, k, memory, room, bits, got};
    simt::call(cuda::transform_select, &source, 1, code);
    simt::expect_equal(bits.get(), bitmap.get(), nbytes, "transform_select: bitmap, " + title);
    // Where only one device multiplies by zero, a part of a pair may be a number on one device and NaN on the other.
    if (finite) expect_close(got, values, k * t.group, "transform_select: values, " + title);
  });
}

static void test_select(uint32_t code, int64_t n) {
  const int64_t groups = layout_of(code, n).groups(), some = (15 * groups + 99) / 100;
  if (groups == 0) return;
  // Few codes have all cases: the others would show the same.
  const bool all = code == dct(3, 3) || code == fourier(3);
  test_select(code, simt::data(simt::Kind::normal, n), some, "data", n % 2);
  test_select(code, simt::data(simt::Kind::ties, n), (groups + 1) / 2, "ties", true);
  test_select<BFloat16>(code, simt::data(simt::Kind::normal, n), some, "data of bfloat16", true);
  test_select<Float16>(code, simt::data(simt::Kind::normal, n), some, "data of float16", n % 2);
  if (!all) return;
  test_select(code, simt::data(simt::Kind::normal, n), 1, "data", true);
  test_select(code, simt::data(simt::Kind::zeros, n), some, "zeros", false);
  for (int64_t k : {int64_t(1), some, groups}) test_select(code, simt::data(simt::Kind::sparse, n), k, "sparse", true);
  for (float scale : {1e-36f, 1e36f}) {
    auto scaled = simt::data(simt::Kind::normal, n);
    for (float& v : scaled) v *= scale;
    test_select(code, scaled, (groups + 5) / 6, "scaled data", true);
  }
  // What is not finite is selected first.
  auto x = simt::data(simt::Kind::normal, n);
  x[size_t(n / 2)] = std::numeric_limits<float>::infinity();
  x[size_t(n / 3)] = std::numeric_limits<float>::quiet_NaN();
  const int64_t touched = 2 * layout_of(code, n).length;
  test_select(code, x, std::min(groups, touched + 7), "non-finite data", true, false);
}

struct Part {
  simt::Buffer<uint8_t> bitmap, packed, wire;
  int64_t count;
  RangeFloat format;

  Part(int64_t groups, int group, int bits, unsigned one_in, unsigned seed, int64_t skip)
      : Part(groups, group, bits, one_in, std::mt19937(seed), skip) {}
  TransformPart get() const { return {bitmap, packed, packed.size(), count, nullptr, format}; }
  TransformPart get_by_wire() const {
    RangeFloat bits_only{};
    bits_only.bits = format.bits;
    return {bitmap, packed, packed.size(), count, wire, bits_only};
  }

 private:
  Part(int64_t groups, int group, int bits, unsigned one_in, std::mt19937 random, int64_t skip)
      : bitmap((groups + 7) / 8, skip), packed(0), wire(8, skip), count(0) {
    for (int64_t i = 0; i < bitmap.size(); ++i) bitmap[i] = 0;
    for (int64_t i = 0; i < groups; ++i) {
      if (random() % one_in) continue;
      bitmap[i / 8] |= uint8_t(1 << i % 8);
      ++count;
    }
    packed = simt::Buffer<uint8_t>((group * count * bits + 7) / 8, 1 - skip % 2);
    for (int64_t i = 0; i < packed.size(); ++i) packed[i] = uint8_t(random());
    const RangeFit fit{&format, nullptr, 0};
    cpu::range_float_fit(&fit, 1, bits, bits / 2, -2.0f, 1.0f, 1);
    const uint64_t word = range_wire(format);
    std::memcpy(wire.get(), &word, 8);
    // As a peer reads it: codes above P + Q, which random codes may be, are negative numbers then.
    if (!range_of_wire(word, bits, &format)) std::fprintf(stderr, "a format is refused\n"), std::exit(1);
  }
};

static void test_decode(uint32_t code, int64_t n, int count) {
  const TransformLayout t = layout_of(code, n);
  std::vector<Part> parts;
  for (int c = 0; c < count; ++c)
    parts.emplace_back(t.groups(), t.group, 2 + 7 * c % 15, c % 3 == 2 ? 1000u : unsigned(1 + 6 * (c % 3)), unsigned(c),
                       c % 4);
  std::vector<TransformPart> table, by_wire;
  for (const Part& part : parts) table.push_back(part.get()), by_wire.push_back(part.get_by_wire());
  const auto start = simt::data(simt::Kind::normal, n);
  for (bool add : {false, true}) {
    const simt::Buffer<float> expected(start);
    int32_t refused = 0;
    const WeightedSum sum{expected, n, count, add, 0};
    cpu::transform_decode(&sum, 1, table.data(), code, 0.3f, &refused, 1);
    simt::expect_equal(refused, 0, "transform_decode on the CPU: failed");
    const simt::Buffer<float> same(start);
    const WeightedSum sum_by_wire{same, n, count, add, 0};
    cpu::transform_decode(&sum_by_wire, 1, by_wire.data(), code, 0.3f, &refused, 1);
    simt::expect_equal(refused, 0, "transform_decode by the wire on the CPU: failed");
    simt::expect_equal(same.get(), expected.get(), n, "transform_decode by the wire on the CPU");
    in_some_order([&] {
      for (const auto& listed : {table, by_wire}) {
        const simt::Buffer<float> out(start, n % 4);
        const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
        const WeightedSum on_device{out, n, count, add, 0};
        simt::call(cuda::transform_decode, &on_device, 1, listed.data(), code, 0.3f, failed);
        simt::expect_equal(*failed.get(), 0, "transform_decode: failed");
        expect_close(out, expected, n, name("transform_decode", code, n) + ", parts: " + std::to_string(count));
      }
    });
  }
  const auto expect_invalid = [&](const std::vector<TransformPart>& wrong, int32_t index, bool add, bool flag) {
    const simt::Buffer<float> out(start);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    int32_t* const reported = flag ? failed.get() : nullptr;
    const WeightedSum sum{out, n, count, add, 0};
    simt::call(cuda::transform_decode, &sum, 1, wrong.data(), code, 0.3f, reported);
    if (flag) simt::expect_equal(*reported, index + 1, "transform_decode of an invalid part: failed");
    for (int64_t i = 0; i < n; ++i)
      if (!std::isnan(out[i])) std::fprintf(stderr, "an invalid part gives a number\n"), std::exit(1);
  };
  // The first invalid part counts, be it invalid by its number of bits or by bits past the end.
  for (int bad = 0; bad < count; bad += 3) {
    auto wrong = table;
    for (int c = bad; c < count; c += 2) wrong[size_t(c)].count += c % 4 ? -1 : 1;
    expect_invalid(wrong, bad, bad % 2, bad > 0);
  }
  // So does a format of other bits than expected, or one that is invalid: no mantissa, and a number that is infinite.
  for (int spoilt = 0; count > 0 && spoilt < 3; ++spoilt) {
    const int bad = (spoilt + int(n)) % count;
    auto wrong = by_wire;
    const simt::Buffer<uint8_t> wire(8, spoilt);
    std::memcpy(wire.get(), parts[size_t(bad)].wire, 8);
    wire[spoilt == 0 ? 7 : spoilt == 1 ? 6 : 3] = uint8_t(spoilt == 0 ? wire[7] % 16 + 1 : spoilt == 1 ? 0 : 0xff);
    wrong[size_t(bad)].wire = wire;
    expect_invalid(wrong, bad, false, true);
    int32_t refused = 0;
    const simt::Buffer<float> out(start);
    const WeightedSum sum{out, n, count, false, 0};
    cpu::transform_decode(&sum, 1, wrong.data(), code, 0.3f, &refused, 1);
    simt::expect_equal(refused, bad + 1, "transform_decode of an invalid format on the CPU: failed");
    simt::expect_equal(out.get(), start.data(), n, "transform_decode of an invalid format on the CPU");
  }
  if (count == 0 || t.groups() % 8 == 0) return;
  parts.back().bitmap[t.groups() / 8] |= 0x80;
  expect_invalid(table, count - 1, false, true);
}

// More vectors than a launch takes, of different sizes, and sums of them: of no, one and several parts. In the sums of
// index `invalid`, a part is, which spoils these alone.
static void test_several(uint32_t code, int64_t most, const std::vector<int64_t>& invalid) {
  constexpr int64_t kCount = cuda::kMostVectors + 4;
  struct Selected {
    simt::Buffer<float> values;
    simt::Buffer<uint8_t> bitmap;
  };
  std::vector<simt::Buffer<float>> xs, outs, wanted;
  std::vector<Selected> expected, got;
  std::vector<TransformSource> there, sources;
  std::vector<Part> held;
  std::vector<TransformPart> parts;
  std::vector<WeightedSum> sums_there, sums;
  int32_t first_invalid = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const int64_t n = i % 3 ? 1 + 5 * i : most - i;
    const TransformLayout t = layout_of(code, n);
    const int64_t groups = t.groups(), k = 1 + groups / 7;
    xs.emplace_back(simt::data(i % 2 ? simt::Kind::normal : simt::Kind::ties, n), i % 4);
    for (auto* of : {&expected, &got})
      of->push_back({simt::Buffer<float>(k * t.group), simt::Buffer<uint8_t>((groups + 7) / 8)});
    there.push_back({xs.back(), 0, n, k, nullptr, 0, expected.back().bitmap, expected.back().values});
    sources.push_back({xs.back(), 0, n, k, nullptr, 0, got.back().bitmap, got.back().values});
    const bool spoilt = std::count(invalid.begin(), invalid.end(), i) > 0;
    for (int64_t c = 0; c < (i == 5 ? kMostParts : i % 4); ++c) {
      held.emplace_back(groups, t.group, 2 + int(c) % 9, 5u, unsigned(i + c), c % 4);
      parts.push_back(held.back().get());
      if (!spoilt || c != i % 4 - 1) continue;
      ++parts.back().count;
      if (!first_invalid) first_invalid = int32_t(parts.size());
    }
    const auto start = simt::data(simt::Kind::normal, n);
    wanted.emplace_back(start), outs.emplace_back(start, i % 4);
    sums_there.push_back({wanted.back(), n, i == 5 ? kMostParts : i % 4, i % 2, 0});
    sums.push_back({outs.back(), n, i == 5 ? kMostParts : i % 4, i % 2, 0});
  }
  cpu::transform_select(there.data(), kCount, code, 2);
  simt::call(cuda::transform_select, sources.data(), kCount, code);
  for (size_t i = 0; i < got.size(); ++i) {
    const auto& bits = got[i].bitmap;
    simt::expect_equal(bits.get(), expected[i].bitmap.get(), bits.size(), "transform_select of several: bitmap");
    expect_close(got[i].values, expected[i].values, got[i].values.size(), "transform_select of several: values");
  }
  int32_t refused = 0;
  cpu::transform_decode(sums_there.data(), kCount, parts.data(), code, 0.3f, &refused, 2);
  simt::expect_equal(refused, first_invalid, "transform_decode of several on the CPU: failed");
  const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
  simt::call(cuda::transform_decode, sums.data(), kCount, parts.data(), code, 0.3f, failed);
  simt::expect_equal(*failed.get() > 0, refused > 0, "transform_decode of several: failed");
  for (int64_t i = 0; i < kCount; ++i) {
    const bool spoilt = std::count(invalid.begin(), invalid.end(), i) > 0;
    for (int64_t j = 0; j < sums[size_t(i)].n; ++j)
      if (std::isnan(outs[size_t(i)][j]) != spoilt) std::fprintf(stderr, "the wrong sum is NaN\n"), std::exit(1);
    if (!refused) expect_close(outs[size_t(i)], wanted[size_t(i)], sums[size_t(i)].n, "transform_decode of several");
  }
}

int main() {
  for (uint32_t code : {dct(3, 3), fourier(6), kPairs}) {
    if (simt::kRaces && code == kPairs) continue;
    test_several(code, simt::kRaces ? 9000 : 40000, {});
    if (!simt::kRaces) test_several(code, 9000, {7, 18});
  }
  const uint32_t codes[] = {dct(1),     dct(3, 3),  dct(5, 5),   dct(7, 7), dct(3, 3, 3), dct(8),
                            dct(16),    fourier(4), fourier(5),  dct(64),   dct(256),     fourier(3),
                            fourier(6), fourier(8), fourier(10), kPairs};
  for (uint32_t code : codes) {
    if (simt::kRaces && code != dct(3, 3) && code != fourier(6)) continue;
    const TransformLayout t = layout_of(code, 0);
    // None, one, a row and its neighbours, a tile and its neighbours, several tiles and a tail: more than four blocks.
    const int64_t rows = 5 * t.length + t.length / 2, tiles = 5 * t.tile + 2 * t.length + 3;
    for (int64_t n : {int64_t(0), int64_t(1), t.length - int64_t(1), int64_t(t.length), rows, t.tile - 1, t.tile,
                      t.tile + 1, tiles}) {
      if (simt::kRaces && n != rows && n != tiles) continue;
      test_transform(code, n, n % 2 ? simt::Kind::normal : simt::Kind::wild);
      if (n == t.tile - 1 || n == t.tile) continue;
      test_select(code, n);
      test_decode(code, n, n == tiles ? 5 : 2);
    }
  }
  // Every length.
  for (int a = 2; a <= kMostAxis; ++a)
    for (uint32_t code : {dct(a), dct(2, a), dct(3, 2, a)})
      if ((a < 8 || code != dct(3, 2, a)) && (!simt::kRaces || a == 8)) test_transform(code, 9001, simt::Kind::normal);
  for (uint32_t code : {dct(32), dct(128), fourier(4), fourier(5), fourier(7), fourier(9)})
    test_transform(code, 9000, simt::Kind::normal);
  // More tiles than a multiprocessor has blocks.
  test_select(dct(3, 3), simt::data(simt::Kind::ties, 80000), 30000, "ties of many tiles", true);
  test_decode(dct(3, 3), 10000, kMostParts);
  test_decode(fourier(6), 10000, 0);
}
