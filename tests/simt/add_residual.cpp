// add_residual.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/add_residual.cu"

using namespace gradzip;

// Parts of these sizes and one type, whose memory and whose residual's is at all addresses, one after the other.
template <class T>
static void test(const std::vector<int64_t>& sizes) {
  std::vector<simt::Buffer<T>> parts;
  std::vector<ResidualSum> table;
  int64_t all = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const std::vector<float> x = simt::data(i % 2 ? simt::Kind::wild : simt::Kind::normal, sizes[i]);
    parts.emplace_back(simt::as<T>(x), int64_t(i % 5));
    table.push_back({parts.back().get(), nullptr, nullptr, sizes[i], dtype_of(parts.back().get())});
    all += sizes[i];
  }
  const simt::Buffer<float> residual(simt::data(simt::Kind::normal, all), 1);
  const auto run = [&](auto kernel, const char* what) {
    const simt::Buffer<float> out(all, 2);
    int64_t at = 0;
    for (ResidualSum& sum : table) {
      sum.residual = residual + at, sum.out = out + at;
      at += sum.n;
    }
    kernel(table.data(), int64_t(table.size()));
    at = 0;
    for (size_t i = 0; i < sizes.size(); at += sizes[i++]) {
      std::vector<float> expected;
      for (int64_t j = 0; j < sizes[i]; ++j) expected.push_back(to_float(parts[i][j]) + residual[at + j]);
      simt::expect_equal(out + at, expected.data(), sizes[i], what);
    }
  };
  for (int threads : {1, 2})
    run([&](const ResidualSum* t, int64_t n) { cpu::add_residual(t, n, threads); }, "add_residual on the CPU");
  simt::in_any_order(
      all, [&] { run([](const ResidualSum* t, int64_t n) { cuda::add_residual(t, n, nullptr); }, "add_residual"); });
}

// To the memory of x.
static void test_in_place(int64_t n) {
  const std::vector<float> x = simt::data(simt::Kind::normal, n);
  const simt::Buffer<float> residual(simt::data(simt::Kind::wild, n)), expected(x);
  const auto table = [&](float* of) { return ResidualSum{of, residual, of, n, int64_t(Dtype::float32)}; };
  const ResidualSum wanted = table(expected);
  cpu::add_residual(&wanted, 1, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<float> got(x);
    const ResidualSum sum = table(got);
    cuda::add_residual(&sum, 1, nullptr);
    simt::expect_equal(got.get(), expected.get(), n, "add_residual in place");
  });
}

int main() {
  std::vector<int64_t> sizes = simt::kSizes, many;
  for (int64_t n : {2, 4, 2047, 2048, 2049}) sizes.push_back(n);
  for (int64_t i = 0; i < 3 * cuda::kAddBatch; ++i) many.push_back(i % 41);  // more than one launch takes
  for (const auto& some : {sizes, many, std::vector<int64_t>{}, std::vector<int64_t>{0, 0}}) {
    test<float>(some);
    test<BFloat16>(some);
    test<Float16>(some);
  }
  for (int64_t n : sizes) test_in_place(n);
}
