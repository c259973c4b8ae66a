// bitmap, compact and expand.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/compact.cu"

using namespace gradzip;

static void test_bitmap(const simt::Buffer<float>& x, int64_t n, const Selection& selection, int64_t skip) {
  const simt::Buffer<uint8_t> expected((n + 7) / 8);
  const int64_t set = cpu::bitmap(x, n, selection, expected, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> bits((n + 7) / 8, skip);
    const simt::Buffer<int64_t> count(1);
    const simt::Buffer<Selection> on_device(std::vector<Selection>{selection});
    cuda::bitmap(x, n, on_device, bits, count, simt::workspace(cuda::bitmap_workspace(n)).get(), nullptr);
    simt::expect_equal(bits.get(), expected.get(), bits.size(), "bitmap");
    simt::expect_equal(*count.get(), set, "bitmap: set bits");
  });
}

template <class T>
static void test_compact(const simt::Buffer<T>& x, int64_t n, const simt::Buffer<uint8_t>& bits, int64_t set) {
  const simt::Buffer<T> packed(set), spread(n);
  cpu::compact(x, n, sizeof(T), bits, packed, set, 1);
  cpu::expand(packed, set, sizeof(T), bits, spread, n, 1);
  simt::in_any_order(n, [&] {
    const auto scratch = simt::workspace(cuda::compact_workspace(n));
    const simt::Buffer<int64_t> count(1);
    const simt::Buffer<T> out(set), back(n);
    cuda::compact(x, n, sizeof(T), bits, out, set, count, scratch.get(), nullptr);
    simt::expect_equal(out.get(), packed.get(), set, "compact");
    simt::expect_equal(*count.get(), set, "compact: set bits");
    cuda::expand(packed, set, sizeof(T), bits, back, n, count, scratch.get(), nullptr);
    simt::expect_equal(back.get(), spread.get(), n, "expand");
    simt::expect_equal(*count.get(), set, "expand: set bits");
  });
  if (set == 0) return;
  // Too little room, too few values: nothing is written, and the count tells.
  const auto scratch = simt::workspace(cuda::compact_workspace(n));
  const simt::Buffer<int64_t> count(1);
  const simt::Buffer<T> out(set - 1), untouched(n), back(n);
  cuda::compact(x, n, sizeof(T), bits, out, set - 1, count, scratch.get(), nullptr);
  simt::expect_equal(out.get(), untouched.get(), set - 1, "compact without room");
  simt::expect_equal(*count.get(), set, "compact without room: set bits");
  cuda::expand(out, set - 1, sizeof(T), bits, back, n, count, scratch.get(), nullptr);
  simt::expect_equal(back.get(), untouched.get(), n, "expand of too few");
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
      const simt::Buffer<uint8_t> bits((n + 7) / 8, n % 4);
      const int64_t set = cpu::bitmap(x, n, {0.9f, 0, n}, bits, 1);
      if (n % 8) bits[n / 8] |= uint8_t(0xff << n % 8);  // what lies past n is not looked at
      test_compact(x, n, bits, set);
      simt::Buffer<uint64_t> wide(n);
      for (int64_t i = 0; i < n; ++i) wide[i] = uint64_t(i) * 0x9E3779B97F4A7C15u;
      test_compact(wide, n, bits, set);
    }
  }
}
