// abs_max.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/abs_max.cu"

using namespace gradzip;

template <class T>
static void test() {
  simt::Sizes sizes = simt::kSizes;  // and some whose last element is the largest one
  sizes.insert(sizes.end(), {2, 5, 1000, 1023});
  for (int64_t n : sizes)
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<T> x(simt::as<T>(simt::data(kind, n)), n % 4);
      float expected;
      cpu::abs_max(x, dtype_of(x), n, &expected, 1);
      simt::in_any_order(n, [&] {
        const simt::Buffer<float> most(1);
        cuda::abs_max(x, dtype_of(x), n, most, nullptr);
        simt::expect_equal(*most.get(), expected, "abs_max");
      });
    }
}

// Vectors, as matrices of one column, in one call.
template <class T>
static void test_vectors() {
  std::vector<simt::Buffer<T>> vectors;
  std::vector<Matrix> matrices;
  for (int64_t n : {0, 1, 2, 5, 33, 1023, 9001})
    for (simt::Kind kind : simt::kKinds) {
      vectors.emplace_back(simt::as<T>(simt::data(kind, n)), n % 4);
      matrices.push_back({reinterpret_cast<float*>(vectors.back().get()), n, 1});
    }
  const auto count = int64_t(matrices.size());
  const simt::Buffer<float> expected(count), most(count);
  cpu::abs_max_columns(matrices.data(), count, dtype_of(vectors[0]), expected, 1);
  cuda::abs_max_columns(matrices.data(), count, dtype_of(vectors[0]), most, nullptr);
  simt::expect_equal(most.get(), expected.get(), count, "abs_max_columns of vectors");
}

int main() {
  test<float>(), test<BFloat16>(), test<Float16>();
  test_vectors<float>(), test_vectors<BFloat16>(), test_vectors<Float16>();

  // The columns of several matrices, in one call.
  std::vector<simt::Buffer<float>> buffers;
  std::vector<Matrix> matrices;
  int64_t columns_of_all = 0;
  for (int64_t columns : {1, 3, 4, 70, 0, 3000})
    for (simt::Kind kind : simt::kKinds)
      for (int64_t rows : {0, 1, 33, 700}) {
        if (columns > 1000 && rows > 33) continue;
        buffers.emplace_back(simt::data(kind, rows * columns), rows % 4);
        matrices.push_back({buffers.back().get(), rows, columns});
        columns_of_all += columns;
      }
  const simt::Buffer<float> expected(columns_of_all), most(columns_of_all);
  cpu::abs_max_columns(matrices.data(), int64_t(matrices.size()), 0, expected, 1);
  cuda::abs_max_columns(matrices.data(), int64_t(matrices.size()), 0, most, nullptr);
  simt::expect_equal(most.get(), expected.get(), columns_of_all, "abs_max_columns");
}
