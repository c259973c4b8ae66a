// compact and compact_expand.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/compact.cu"

using namespace gradzip;

template <class T>
static void test_compact(const simt::Buffer<T>& x, int64_t n, const simt::Buffer<uint8_t>& bits, int64_t set) {
  const simt::Buffer<T> packed(set), spread(n);
  int64_t found;
  cpu::compact(x, n, sizeof(T), bits, packed, set, &found, 1);
  simt::expect_equal(found, set, "compact on the CPU: set bits");
  cpu::compact_expand(packed, set, sizeof(T), bits, spread, n, &found, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<int64_t> count(1);
    const simt::Buffer<T> out(set), back(n);
    simt::call(cuda::compact, x, n, sizeof(T), bits, out, set, count);
    simt::expect_equal(out.get(), packed.get(), set, "compact");
    simt::expect_equal(*count.get(), set, "compact: set bits");
    simt::call(cuda::compact_expand, packed, set, sizeof(T), bits, back, n, count);
    simt::expect_equal(back.get(), spread.get(), n, "compact_expand");
    simt::expect_equal(*count.get(), set, "compact_expand: set bits");
  });
  if (set == 0) return;
  // Too little capacity, or too few values: nothing is written, and the count shows it.
  const simt::Buffer<int64_t> count(1);
  const simt::Buffer<T> out(set - 1), untouched(n), back(n);
  simt::call(cuda::compact, x, n, sizeof(T), bits, out, set - 1, count);
  simt::expect_equal(out.get(), untouched.get(), set - 1, "compact without room");
  simt::expect_equal(*count.get(), set, "compact without room: set bits");
  simt::call(cuda::compact_expand, out, set - 1, sizeof(T), bits, back, n, count);
  simt::expect_equal(back.get(), untouched.get(), n, "compact_expand of too few");
}

int main() {
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      if (n > 10000 && kind != simt::Kind::normal && kind != simt::Kind::ties) continue;
      const simt::Buffer<float> x(simt::data(kind, n), n % 3);
      const simt::Buffer<uint8_t> bits((n + 7) / 8, n % 4);
      const Selection selection{0.9f, 0, n};
      int64_t set;
      cpu::bitmap(x, n, &selection, bits, &set, 1);
      if (n % 8) bits[n / 8] |= uint8_t(0xff << n % 8);  // bits past n are ignored
      test_compact(x, n, bits, set);
      simt::Buffer<uint64_t> wide(n);
      for (int64_t i = 0; i < n; ++i) wide[i] = uint64_t(i) * 0x9E3779B97F4A7C15u;
      test_compact(wide, n, bits, set);
    }
  }
}
