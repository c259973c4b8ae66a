// bitmap, bitmap_count and bitmap_indices.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/bitmap.cu"

using namespace gradzip;

static void test_bitmap(const simt::Buffer<float>& x, int64_t n, const Selection& selection, int64_t skip) {
  const simt::Buffer<uint8_t> expected((n + 7) / 8);
  int64_t set;
  cpu::bitmap(x, n, &selection, expected, &set, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> bits((n + 7) / 8, skip);
    const simt::Buffer<int64_t> count(1);
    const simt::Buffer<Selection> on_device(std::vector<Selection>{selection});
    simt::call(cuda::bitmap, x, n, on_device, bits, count);
    simt::expect_equal(bits.get(), expected.get(), bits.size(), "bitmap");
    simt::expect_equal(*count.get(), set, "bitmap: set bits");
  });
}

static void test_indices(int64_t n, const std::vector<int32_t>& indices) {
  const int64_t count = int64_t(indices.size());
  const simt::Buffer<uint8_t> bits((n + 7) / 8, n % 4);
  if (n) std::memset(bits.get(), 0, size_t(bits.size()));
  for (int32_t i : indices) bits[i / 8] |= uint8_t(1 << i % 8);
  const simt::Buffer<int32_t> where(count);
  int64_t found;
  cpu::bitmap_indices(bits, n, count, where, &found, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<int32_t> got(count), untouched(count + 1), more(count + 1);
    const simt::Buffer<int64_t> set(1);
    simt::call(cuda::bitmap_indices, bits, n, count, got, set);
    simt::expect_equal(got.get(), where.get(), count, "bitmap_indices");
    simt::expect_equal(*set.get(), count, "bitmap_indices: set bits");
    simt::call(cuda::bitmap_indices, bits, n, count + 1, more, set);
    simt::expect_equal(more.get(), untouched.get(), count + 1, "bitmap_indices of another count");
    simt::call(cuda::bitmap_count, bits, n, set);
    simt::expect_equal(*set.get(), count, "bitmap_count");
  });
}

int main() {
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      if (n > 10000 && kind != simt::Kind::normal && kind != simt::Kind::ties) continue;
      const simt::Buffer<float> x(simt::data(kind, n), n % 3);
      for (int64_t k : {int64_t(1), n / 6, n}) {
        if (k < 1 || k > n || (n > 10000 && k != n / 6)) continue;
        Selection selection;
        cpu::select(x, n, k, &selection, 1);
        test_bitmap(x, n, selection, k % 4);
      }
      test_bitmap(x, n, {-0.0f, 0, n}, 0);
      test_bitmap(x, n, {1.0f, 0, 0}, 1);
    }
  }
  std::mt19937 random(7);
  for (int64_t n : {0, 1, 7, 8, 33, 1000, 8192, 8193, 65537})
    for (unsigned one_in : {1, 2, 6, 100, 5000}) {
      std::vector<int32_t> indices;
      for (int64_t i = 0; i < n; ++i)
        if (random() % one_in == 0) indices.push_back(int32_t(i));
      test_indices(n, indices);
    }
}
