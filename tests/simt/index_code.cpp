// index_code_encode, index_code_decode and index_code_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/index_code.cu"

using namespace gradzip;

using Bytes = simt::Buffer<uint8_t>;
using Indices = simt::Buffer<int32_t>;
using Floats = simt::Buffer<float>;

static int64_t encode(const Indices& indices, int64_t numel, const Bytes& out) {
  const simt::Buffer<int64_t> nbytes(1);
  const IndexSource table{indices, indices.size(), numel, out, out.size(), nbytes};
  simt::call(cuda::index_code_encode, &table, 1);
  return *nbytes.get();
}

// The same on the CPU, for any room.
static int64_t encode_there(const Indices& indices, int64_t numel, uint8_t* out = nullptr, int64_t capacity = 0) {
  int64_t nbytes;
  const IndexSource table{indices, indices.size(), numel, out, capacity, &nbytes};
  cpu::index_code_encode(&table, 1, 1);
  return nbytes;
}

// For any bytes, CPU and CUDA agree on whether they are valid, and stay within bounds.
static void test_decode(const Bytes& stream, int64_t numel, int64_t count, bool sound = false) {
  const int64_t nbytes = stream.size();
  const Indices expected(count);
  const Floats values(simt::data(simt::Kind::normal, count)), sum(simt::data(simt::Kind::sparse, numel));
  int32_t corrupt = 0;
  const IndexStream on_cpu{stream, nbytes, numel, count, expected};
  cpu::index_code_decode(&on_cpu, 1, &corrupt, 1);
  const WeightedSum table{sum, numel, 1, 1, 0};
  const IndexTerm term{stream, nbytes, values, count, 0.3};
  if (!corrupt) cpu::index_code_decode_add(&table, 1, &term, &corrupt, 1);
  const auto compare = [&] {
    const Indices got(count);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0, 0});
    const IndexStream listed{stream, nbytes, numel, count, got};
    simt::call(cuda::index_code_decode, &listed, 1, failed);
    const Floats out(simt::data(simt::Kind::sparse, numel));
    const WeightedSum same{out, numel, 1, 1, 0};
    simt::call(cuda::index_code_decode_add, &same, 1, &term, failed + 1);
    simt::expect_equal(failed[0], corrupt, "index_code_decode: failed");
    simt::expect_equal(failed[1], corrupt, "index_code_decode_add: failed");
    if (!corrupt) simt::expect_equal(got.get(), expected.get(), count, "index_code_decode");
    if (!corrupt) simt::expect_equal(out.get(), sum.get(), numel, "index_code_decode_add");
    for (int64_t i = 0; corrupt && i < numel; ++i)
      if (!std::isnan(out[i])) std::fprintf(stderr, "a corrupt stream gives a number\n"), std::exit(1);
  };
  if (sound)
    simt::in_any_order(numel, compare);
  else
    compare();
}

static void test_stream(int64_t numel, const std::vector<int32_t>& list, std::mt19937& random) {
  const int64_t count = int64_t(list.size());
  const Indices indices(list, count % 3);
  const int64_t nbytes = encode_there(indices, numel);
  const Bytes expected(nbytes, numel % 4);
  simt::expect_equal(encode_there(indices, numel, expected, nbytes), nbytes, "index_code_encode on the CPU: nbytes");
  simt::in_any_order(numel, [&] {
    const Bytes out(nbytes, count % 5), small(nbytes - 1), untouched(nbytes - 1);
    simt::expect_equal(encode(indices, numel, out), nbytes, "index_code_encode: nbytes");
    simt::expect_equal(out.get(), expected.get(), nbytes, "index_code_encode");
    simt::expect_equal(encode(indices, numel, small), nbytes, "index_code_encode without room: nbytes");
    simt::expect_equal(small.get(), untouched.get(), nbytes - 1, "index_code_encode without room");
    simt::expect_equal(encode(indices, numel, Bytes(0)), nbytes, "index_code_encode: nbytes alone");
  });
  test_decode(expected, numel, count, true);
  for (int64_t room : {1, 16, 1000}) {
    std::vector<uint8_t> bytes(expected.get(), expected.get() + nbytes);
    bytes.resize(size_t(nbytes + room), uint8_t(count));
    test_decode(Bytes(bytes), numel, count, true);
  }

  for (int spoilt = 0; spoilt < (simt::kRaces ? 2 : numel > 5000 ? 4 : 16); ++spoilt) {
    std::vector<uint8_t> bytes(expected.get(), expected.get() + nbytes);
    const size_t most = spoilt % 4 ? std::min<size_t>(bytes.size(), 48) : bytes.size();  // mostly headers and tables
    for (int b = 0; b <= spoilt % 3; ++b) bytes[random() % most] = uint8_t(random() >> (random() % 9));
    test_decode(Bytes(bytes, spoilt % 4), numel, count);
  }
  for (int64_t shorter : {int64_t(1), int64_t(4), nbytes / 2, nbytes - 3}) {
    if (shorter > nbytes) continue;
    std::vector<uint8_t> bytes(expected.get(), expected.get() + nbytes - shorter);
    test_decode(Bytes(bytes), numel, count);
    if (bytes.size() < 12) continue;
    const uint32_t claim = uint32_t(bytes.size());
    std::memcpy(&bytes[8], &claim, 4);
    test_decode(Bytes(bytes), numel, count);
  }
  test_decode(expected, numel, count + 1);
  test_decode(expected, numel + 8, count);
  if (count < 2) return;
  for (const auto& [at, value] : {std::pair<int64_t, int32_t>{count - 1, int32_t(numel)},
                                  {0, -1},
                                  {count / 2, list[size_t(count / 2 - 1)]},
                                  {count - 1, -5}}) {
    std::vector<int32_t> wrong = list;
    wrong[size_t(at)] = value;
    if (encode(Indices(wrong), numel, Bytes(nbytes + 64)) != -1)
      std::fprintf(stderr, "index_code_encode takes %d at %lld\n", value, (long long)at), std::exit(1);
  }
}

// Several sums in one call, with different numbers of terms that add to the same elements. `spoilt`: a corrupt term.
static void test_table(const std::vector<int64_t>& sizes, int64_t spoilt = -1) {
  const auto count = int64_t(sizes.size());
  std::vector<Bytes> streams;
  std::vector<Floats> values;
  std::vector<IndexTerm> terms;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t t = 0; t < i % 4; ++t) {
      std::vector<int32_t> list;
      for (int64_t at = t; at < sizes[size_t(i)]; at += 1 + (i + t) % 7) list.push_back(int32_t(at));
      const auto k = int64_t(list.size());
      const Indices indices(list);
      const int64_t nbytes = encode_there(indices, sizes[size_t(i)]);
      streams.emplace_back(nbytes, t);
      encode_there(indices, sizes[size_t(i)], streams.back(), nbytes);
      if (int64_t(terms.size()) == spoilt) streams.back()[4] ^= 1;
      values.emplace_back(simt::data(simt::Kind::normal, k));
      terms.push_back({streams.back(), nbytes, values.back(), k, 0.3 * double(t + 1)});
    }
  const auto sums = [&](std::vector<Floats>& outs) {
    std::vector<WeightedSum> table;
    for (int64_t i = 0; i < count; ++i) {
      outs.emplace_back(simt::data(simt::Kind::normal, sizes[size_t(i)]), i % 3);
      table.push_back({outs.back(), sizes[size_t(i)], i % 4, i / 4 % 2, 0});
    }
    return table;
  };
  std::vector<Floats> expected;
  int32_t corrupt = 0;
  cpu::index_code_decode_add(sums(expected).data(), count, terms.data(), &corrupt, 1);
  simt::expect_equal(corrupt, int32_t(spoilt + 1), "index_code_decode_add of a table on the CPU: failed");
  std::vector<Floats> outs;
  const auto table = sums(outs);
  const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
  simt::call(cuda::index_code_decode_add, table.data(), count, terms.data(), failed);
  simt::expect_equal(*failed.get(), int32_t(spoilt >= 0), "index_code_decode_add of a table: failed");
  for (int64_t i = 0, first = 0; i < count; first += i++ % 4) {
    const bool bad = first <= spoilt && spoilt < first + i % 4;
    if (spoilt < 0)  // the CPU stops at a corrupt term
      simt::expect_equal(outs[size_t(i)].get(), expected[size_t(i)].get(), sizes[size_t(i)], "a table");
    for (int64_t j = 0; j < sizes[size_t(i)]; ++j)
      if (std::isnan(outs[size_t(i)][j]) != bad) std::fprintf(stderr, "the wrong sum is NaN\n"), std::exit(1);
  }
}

// More terms than a block finds the indices of together, or a launch reads, on two tiles of a sum.
static void test_many_terms() {
  constexpr int64_t kTerms = cuda::kTermsAtOnce + 3, numel = cuda::kSumTile + 5;
  static_assert(kTerms > cuda::kIndexReads);
  std::vector<Bytes> streams;
  std::vector<Floats> values;
  std::vector<IndexTerm> terms;
  for (int64_t t = 0; t < kTerms; ++t) {
    std::vector<int32_t> list;
    for (int64_t at = t * 61; at < numel; at += 1 + t % 3 * 900) list.push_back(int32_t(at));
    const Indices indices(list);
    const int64_t nbytes = encode_there(indices, numel);
    streams.emplace_back(nbytes, t % 4);
    encode_there(indices, numel, streams.back(), nbytes);
    values.emplace_back(simt::data(simt::Kind::normal, int64_t(list.size())));
    terms.push_back({streams.back(), nbytes, values.back(), int64_t(list.size()), 1.0 / double(kTerms)});
  }
  const Floats expected(numel), out(numel, 1);
  int32_t corrupt = 0, failed = 0;
  const WeightedSum on_cpu{expected, numel, kTerms, 0, 0}, sum{out, numel, kTerms, 0, 0};
  cpu::index_code_decode_add(&on_cpu, 1, terms.data(), &corrupt, 1);
  simt::call(cuda::index_code_decode_add, &sum, 1, terms.data(), &failed);
  simt::expect_equal(failed, corrupt, "index_code_decode_add of many terms: failed");
  simt::expect_equal(out.get(), expected.get(), numel, "index_code_decode_add of many terms");
}

// More streams than a launch writes or reads: in both forms, empty, invalid, and without the room, which are corrupt.
static void test_sources() {
  std::vector<Indices> indices;
  std::vector<Bytes> expected, outs;
  std::vector<IndexSource> table, on_cpu;
  constexpr int64_t kCount = cuda::kMostVectors + 7;
  const simt::Buffer<int64_t> nbytes(kCount), wanted(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    const int64_t numel = i % 5 ? 30 * i * i : 20000;
    std::vector<int32_t> list;
    for (int64_t at = i; at < numel; at += 1 + i % 4 * 40) list.push_back(int32_t(at));
    if (i == 4) list.back() = int32_t(numel);
    indices.emplace_back(list, i % 3);
    const int64_t room = std::max<int64_t>(0, encode_there(indices.back(), numel) - (i == 9));
    expected.emplace_back(room);
    outs.emplace_back(room, i % 5);
    table.push_back({indices.back(), int64_t(list.size()), numel, outs.back(), room, nbytes + i});
    on_cpu.push_back({indices.back(), int64_t(list.size()), numel, expected.back(), room, wanted + i});
  }
  cpu::index_code_encode(on_cpu.data(), kCount, 2);
  simt::call(cuda::index_code_encode, table.data(), kCount);
  simt::expect_equal(nbytes.get(), wanted.get(), kCount, "index_code_encode of a table: nbytes");
  for (size_t i = 0; i < outs.size(); ++i)
    simt::expect_equal(outs[i].get(), expected[i].get(), outs[i].size(), "index_code_encode of a table");
  std::vector<IndexStream> streams;
  std::vector<Indices> back;
  for (int64_t i = 0; i < kCount; ++i) {
    back.emplace_back(table[size_t(i)].count, i % 3);
    streams.push_back(
        {outs[size_t(i)], outs[size_t(i)].size(), table[size_t(i)].numel, table[size_t(i)].count, back.back()});
  }
  const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
  simt::call(cuda::index_code_decode, streams.data(), kCount, failed);
  simt::expect_equal(*failed.get(), 1, "index_code_decode of a table: failed");
  for (int64_t i = 0; i < kCount; ++i)
    if (i != 4 && i != 9)
      simt::expect_equal(back[size_t(i)].get(), indices[size_t(i)].get(), back[size_t(i)].size(),
                         "index_code_decode of a table");
}

int main() {
  test_sources();
  test_many_terms();
  test_table({});
  test_table({100, 33, 9000, 20000, 0, 1, 8192, 300, 5, 7, 70000, 8193});
  test_table({100, 33, 9000, 20000, 0, 1, 8192, 300}, 2);
  std::mt19937 random(7);
  for (int64_t n : {0, 1, 7, 8, 33, 1000, 8192, 8193, 65537})
    for (unsigned one_in : {1, 2, 6, 100, 5000}) {
      if (n > 10000 && one_in != 6) continue;
      if (simt::kRaces && (one_in != 6 || (n != 65537 && n != 1000))) continue;
      std::vector<int32_t> indices;
      for (int64_t i = 0; i < n; ++i)
        if (random() % one_in == 0) indices.push_back(int32_t(i));
      test_stream(n, indices, random);
    }
  // Clusters, for which blocks choose different k, with the largest gaps.
  std::vector<int32_t> clusters;
  for (int32_t c = 0; c < 5; ++c)
    for (int32_t i = 0; i < 1500; ++i) clusters.push_back(c * 13000 + i * (1 + c % 2));
  test_stream(65536, clusters, random);
}
