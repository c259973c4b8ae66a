// ternary_packed and ternary_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/ternary.cu"

using namespace gradzip;

using Bits = simt::Buffer<uint8_t>;
using Floats = simt::Buffer<float>;

template <class T>
static void test(const simt::Buffer<T>& x, int64_t n, float scale, float clip) {
  const int64_t nbytes = (n + 4) / 5;
  const double weight = 1.0 / 3.0;
  const std::string what = "scale = " + std::to_string(scale) + ", clip = " + std::to_string(clip);
  const Bits expected(nbytes);
  const Floats expected_sum(simt::data(simt::Kind::normal, n));
  int32_t refused = 0;
  const TernarySource on_cpu{x, dtype_of(x), n, &scale, std::isinf(clip) ? nullptr : &clip, 3, expected};
  cpu::ternary_packed(&on_cpu, 1, simt::replays_for(n), 1);
  const WeightedSum sum_on_cpu{expected_sum, n, 1, 1, 0};
  const TernaryTerm term_on_cpu{expected, &scale, weight};
  cpu::ternary_decode_add(&sum_on_cpu, 1, &term_on_cpu, &refused, 1);
  simt::expect_equal(refused, 0, "ternary_decode_add on the CPU: failed");
  const auto decode_add = [&](const Bits& packed, const float* scales, double by, const Floats& out, int32_t* failed) {
    const WeightedSum sum{out, n, 1, 1, 0};
    const TernaryTerm term{packed, scales, by};
    simt::call(cuda::ternary_decode_add, &sum, 1, &term, failed);
  };
  simt::in_any_order(n, [&] {
    const Floats scales(std::vector<float>{scale}), clips(std::vector<float>{clip});
    const Bits packed(nbytes, n % 4);
    const Floats sum(simt::data(simt::Kind::normal, n), n % 3);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    const TernarySource source{x, dtype_of(x), n, scales, std::isinf(clip) ? nullptr : clips.get(), 3, packed};
    simt::call(cuda::ternary_packed, &source, 1, simt::replays_for(n));
    simt::expect_equal(packed.get(), expected.get(), nbytes, "ternary_packed, " + what);
    decode_add(packed, scales, weight, sum, failed);
    simt::expect_equal(sum.get(), expected_sum.get(), n, "ternary_decode_add, " + what);
    simt::expect_equal(*failed.get(), 0, "ternary_decode_add: failed, " + what);
    const Floats unscaled(simt::data(simt::Kind::normal, n));
    decode_add(packed, nullptr, weight * double(scale), unscaled, nullptr);
    simt::expect_equal(unscaled.get(), expected_sum.get(), n, "ternary_decode_add without a scale, " + what);
    if (n == 0) return;
    for (int64_t i : {int64_t(0), nbytes - 1}) {
      const Floats spoilt(n);
      const uint8_t byte = packed[i];
      std::fill_n(spoilt.get(), n, 0.0f);
      packed[i] = 243;
      *failed.get() = 0;
      decode_add(packed, scales, weight, spoilt, failed);
      simt::expect_equal(*failed.get(), 1, "ternary_decode_add of a byte there is not: failed");
      int64_t spoilt_count = 0;
      for (int64_t j = 0; j < n; ++j) spoilt_count += std::isnan(spoilt[j]);
      if (spoilt_count < 1 || spoilt_count > 5) simt::fail("%lld elements of a byte are NaN", (long long)spoilt_count);
      packed[i] = byte;
    }
    *scales.get() = -1.0f;
    *failed.get() = 0;
    decode_add(packed, scales, weight, sum, failed);
    simt::expect_equal(*failed.get(), 1, "ternary_decode_add of a scale there is not: failed");
    for (int64_t i = 0; i < n; ++i)
      simt::expect_equal(std::isnan(sum[i]), true, "ternary_decode_add of a scale there is not");
  });
}

// Several tensors in one call. Each sum has three terms.
static void test_table(const std::vector<int64_t>& sizes) {
  const int64_t count = int64_t(sizes.size());
  const Floats numbers(std::vector<float>{2.5f, 1.25f});
  std::vector<Floats> tensors, expected_sums;
  std::vector<Bits> expected;
  int64_t all = 0;
  for (int64_t n : sizes) {
    tensors.emplace_back(simt::data(simt::Kind::normal, n), n % 4);
    all += n;
  }
  const auto sources = [&](std::vector<Bits>& packed, int64_t skip) {
    std::vector<TernarySource> table;
    for (size_t i = 0; i < sizes.size(); ++i) {
      packed.emplace_back((sizes[i] + 4) / 5, skip * int64_t(i % 5));
      const float* clip = i % 2 ? numbers.get() + 1 : nullptr;
      table.push_back({tensors[i], int64_t(Dtype::float32), sizes[i], numbers, clip, 7 + i, packed.back()});
    }
    return table;
  };
  const auto sums = [&](std::vector<Floats>& outs, int64_t skip) {
    std::vector<WeightedSum> table;
    for (size_t i = 0; i < sizes.size(); ++i) {
      outs.emplace_back(simt::data(simt::Kind::ties, sizes[i]), skip * int64_t(i % 3));
      // Some of those that are not added to are 16-bit floats, in memory for float32.
      table.push_back({outs.back(), sizes[i], 3, int64_t(i % 2), i % 2 ? 0 : int64_t(i / 2 % 3)});
    }
    return table;
  };
  const auto terms = [&](const std::vector<Bits>& packed) {
    std::vector<TernaryTerm> table;
    for (const Bits& of : packed)
      for (double weight : {0.3, -0.7, 1.0 / 3.0}) table.push_back({of, weight < 0 ? nullptr : numbers.get(), weight});
    return table;
  };
  cpu::ternary_packed(sources(expected, 0).data(), count, simt::replays_for(count), 1);
  int32_t refused = 0;
  cpu::ternary_decode_add(sums(expected_sums, 0).data(), count, terms(expected).data(), &refused, 1);
  simt::in_any_order(all, [&] {
    std::vector<Bits> packed;
    std::vector<Floats> outs;
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    const auto table = sources(packed, 1);
    simt::call(cuda::ternary_packed, table.data(), count, simt::replays_for(count));
    const auto totals = sums(outs, 1);
    simt::call(cuda::ternary_decode_add, totals.data(), count, terms(packed).data(), failed);
    simt::expect_equal(*failed.get(), 0, "ternary_decode_add of a table: failed");
    for (size_t i = 0; i < sizes.size(); ++i) {
      simt::expect_equal(packed[i].get(), expected[i].get(), packed[i].size(), "ternary_packed of a table");
      simt::expect_equal(outs[i].get(), expected_sums[i].get(), sizes[i], "ternary_decode_add of a table");
    }
  });
}

int main() {
  simt::Sizes sizes = simt::kSizes;
  for (int64_t n : {319, 320, 321, 640, 959}) sizes.push_back(n);
  for (int64_t n : sizes)
    for (simt::Kind kind : simt::kKinds) {
      const std::vector<float> values = simt::data(kind, n);
      const simt::Buffer<float> x(values, n % 4);
      for (float scale : {0.0f, 1.0f, 2.5f, 3e38f, 1e-40f})
        for (float clip : {INFINITY, 1.25f})
          if (n < 10000 || scale == 2.5f) test(x, n, scale, clip);
      test(simt::Buffer<BFloat16>(simt::as<BFloat16>(values), n % 4), n, 2.5f, 1.25f);
      test(simt::Buffer<Float16>(simt::as<Float16>(values), n % 3), n, 2.5f, 1.25f);
    }
  test_table({});
  test_table({320, 0, 5121, 1, 40000, 5120, 319});
  if (!simt::kRaces) test_table(std::vector<int64_t>(120, 7));  // more than one launch takes to the device
}
