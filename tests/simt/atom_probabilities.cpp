// atom_probabilities, of floats and doubles.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/atom_probabilities.cu"

using namespace gradzip;

static auto cpu_kernel(float) { return cpu::atom_probabilities_float; }
static auto cpu_kernel(double) { return cpu::atom_probabilities_double; }
static auto cuda_kernel(float) { return cuda::atom_probabilities_float; }
static auto cuda_kernel(double) { return cuda::atom_probabilities_double; }

template <class T>
static void test(const std::vector<T>& values, double budget) {
  const int64_t n = int64_t(values.size());
  const simt::Buffer<T> atoms(values, n % 3);
  const simt::Buffer<T> expected(n);
  int32_t failed = 0;
  cpu_kernel(T())(atoms, n, budget, expected, &failed, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<T> p(n, n % 2);
    const std::string what = "atom_probabilities, budget = " + std::to_string(budget);
    const simt::Buffer<int32_t> flag(std::vector<int32_t>{0});
    simt::call(cuda_kernel(T()), atoms, n, budget, p, flag);
    simt::expect_equal(*flag.get(), failed, what + ": failed");
    simt::call(cuda_kernel(T()), atoms, n, budget, p, nullptr);
    for (int64_t i = 0; failed && i < n; ++i) simt::expect_equal(std::isnan(p[i]), true, what + ", not finite");
    if (!failed) simt::expect_equal(p.get(), expected.get(), n, what);
  });
}

// Falls geometrically: Newton's method alone does not find the level.
static std::vector<double> falling(int64_t n, double ratio) {
  std::vector<double> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) x[size_t(i)] = std::pow(ratio, double(i));
  return x;
}

int main() {
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      if (n > 10000 && kind == simt::Kind::zeros) continue;
      for (double budget : {0.3, 3.0, 0.1 * double(n), 0.9 * double(n), double(n)}) {
        if (!(budget > 0) || (n > 10000 && budget < 0.5) || (simt::kRaces && budget != 0.1 * double(n))) continue;
        const std::vector<float> x = simt::data(kind, n, true);
        test(x, budget);
        if (n > 10000) continue;
        test(std::vector<double>(x.begin(), x.end()), budget);
        test(simt::data(kind, n), budget);  // wild ones are not finite
      }
    }
  }
  if (simt::kRaces) return 0;
  for (double budget : {1.5, 50.0, 700.0, 900.0}) {
    test(falling(1000, 0.5), budget);
    test(falling(40000, 0.99), 40 * budget);
  }
  test(std::vector<double>(100, 1e308), 3.0);
  test(std::vector<double>(20000, 5e-324), 3.0);
  test(std::vector<double>{1e308, 1e308, 5e-324}, 5.0);
  test(std::vector<double>{1e308, 1e308, INFINITY}, 5.0);
}
