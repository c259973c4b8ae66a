// bitmap_code_encode and bitmap_code_decode; invalid streams.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/bitmap_code.cu"

using namespace gradzip;

// A bitmap whose density changes along it.
static std::vector<uint8_t> random_bitmap(int64_t n, unsigned seed) {
  static constexpr unsigned kPercent[] = {60, 30, 10, 2, 0, 100, 95};
  std::mt19937 random(seed);
  std::vector<uint8_t> bitmap(size_t(n + 7) / 8);
  for (int64_t i = 0; i < n; ++i)
    if (random() % 100 < kPercent[(seed + unsigned(i / 700)) % std::size(kPercent)])
      bitmap[size_t(i / 8)] |= uint8_t(1u << (i % 8));
  return bitmap;
}

static int64_t capacity_of(int64_t n, int segment) { return (n + segment - 1) / segment * 2 + (n + 7) / 8; }

// Segments of several sizes.
static int segment_of(unsigned seed) { return seed % 3 == 0 ? 64 : seed % 3 == 1 ? kMostSegment : 320; }

static int64_t count_of(const std::vector<uint8_t>& bitmap) {
  int64_t count = 0;
  for (const uint8_t byte : bitmap) count += __builtin_popcount(byte);
  return count;
}

// On the CPU, returns the size of the stream.
static int64_t encode(const uint8_t* bitmap, int64_t n, int segment, uint8_t* out) {
  int64_t nbytes;
  const BitmapSource source{bitmap, n, segment, out, &nbytes};
  cpu::bitmap_code_encode(&source, 1, 1);
  return nbytes;
}

static void test(const std::vector<uint8_t>& bits, int64_t n, int segment) {
  const simt::Buffer<uint8_t> bitmap(bits, n % 3), expected(capacity_of(n, segment));
  const int64_t nbytes = encode(bitmap, n, segment, expected);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> out(capacity_of(n, segment), n % 4);
    const simt::Buffer<int64_t> written(1);
    const BitmapSource source{bitmap, n, segment, out, written};
    simt::call(cuda::bitmap_code_encode, &source, 1);
    simt::expect_equal(*written.get(), nbytes, "bitmap_code_encode: nbytes");
    simt::expect_equal(out.get(), expected.get(), nbytes, "bitmap_code_encode");
    const simt::Buffer<uint8_t> stream(std::vector<uint8_t>(out.get(), out.get() + nbytes), n % 4);
    const simt::Buffer<uint8_t> back(int64_t(bits.size()), n % 5);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    const BitmapStream listed{stream, nbytes, count_of(bits), back, n, segment};
    simt::call(cuda::bitmap_code_decode, &listed, 1, true, failed);
    simt::expect_equal(*failed.get(), 0, "bitmap_code_decode: failed");
    simt::expect_equal(back.get(), bitmap.get(), bitmap.size(), "bitmap_code_decode");
  });
}

// A bit of each `period`: a lane that does not know where codes begin may read other codes up to
// the end of its word, over and over.
static std::vector<uint8_t> periodic_bitmap(int64_t n, int period, int from) {
  std::vector<uint8_t> bitmap(size_t(n + 7) / 8);
  for (int64_t i = from; i < n; i += period) bitmap[size_t(i / 8)] |= uint8_t(1u << (i % 8));
  return bitmap;
}

// Streams with changed, missing or additional bytes: CPU and CUDA agree on which are valid, and the sanitizer checks
// all accesses.
static void test_hostile(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  const std::vector<uint8_t> bits = random_bitmap(n, seed);
  const int segment = segment_of(seed / 6);
  std::vector<uint8_t> bytes(size_t(capacity_of(n, segment)));
  int64_t count = count_of(bits);
  bytes.resize(size_t(encode(bits.data(), n, segment, bytes.data())));
  const unsigned what = seed % 6;
  if (what == 0) bytes.resize(random() % (bytes.size() + 1));
  if (what == 1) bytes.resize(bytes.size() + 1 + random() % 200, uint8_t(random()));
  if (what == 2) count += random() % 2 ? 1 : -1;
  if (what == 3)  // other bytes in segments of the same sizes
    for (size_t i = size_t((n + segment - 1) / segment * 2); i < bytes.size(); ++i) bytes[i] = uint8_t(random());
  if (what >= 4 && !bytes.empty())
    for (unsigned i = 0; i < 1 + random() % 3; ++i)
      bytes[random() % std::min<size_t>(bytes.size(), what == 4 ? bytes.size() : 8)] ^= uint8_t(1u << random() % 8);
  const simt::Buffer<uint8_t> stream(bytes, seed % 3), expected(int64_t(bits.size())), back(int64_t(bits.size()));
  // What the stream does decode to, if anything but the number of bits is right; then with room behind it.
  for (int64_t claimed = count, round = 0; round < 4; ++round) {
    const bool exact = round < 2;
    if (round == 2) claimed = count;
    int32_t refused = 0;
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    const BitmapStream on_cpu{stream, stream.size(), claimed, expected, n, segment};
    const BitmapStream listed{stream, stream.size(), claimed, back, n, segment};
    cpu::bitmap_code_decode(&on_cpu, 1, exact, &refused, 1);
    simt::options.seed = seed;
    simt::call(cuda::bitmap_code_decode, &listed, 1, exact, failed);
    simt::expect_equal(*failed.get(), refused,
                       "bitmap_code_decode of other bytes: failed, seed " + std::to_string(seed));
    if (what == 1) simt::expect_equal(refused, int32_t(exact), "bitmap_code_decode of a byte more");
    const std::vector<uint8_t> got(back.get(), back.get() + back.size());
    if (refused)
      simt::expect_equal(count_of(got) != claimed, true, "bitmap_code_decode of other bytes: another count");
    else
      simt::expect_equal(back.get(), expected.get(), back.size(), "bitmap_code_decode of other bytes");
    claimed = count_of(std::vector<uint8_t>(expected.get(), expected.get() + expected.size()));
  }
}

// Several bitmaps in one call, of sizes up to n. Of the streams, those in `corrupt` lack their last byte when they are
// decoded: only their bitmaps are not.
static void test_several(int64_t n, int count, const std::vector<int>& corrupt) {
  std::vector<std::vector<uint8_t>> bitmaps;
  std::vector<simt::Buffer<uint8_t>> streams, written, expected, back;
  std::vector<BitmapStream> on_cpu, listed;
  std::vector<BitmapSource> sources;
  const simt::Buffer<int64_t> sizes(count);
  for (int i = 0; i < count; ++i) {
    const int64_t size = i % 4 == 3 ? 1 + 90 * i : n;
    const int segment = segment_of(unsigned(i));
    const auto& bits = bitmaps.emplace_back(random_bitmap(size, unsigned(i)));
    std::vector<uint8_t> bytes(size_t(capacity_of(size, segment)));
    bytes.resize(size_t(encode(bits.data(), size, segment, bytes.data())));
    written.emplace_back(int64_t(bytes.size()), i % 5);
    sources.push_back({bits.data(), size, segment, written.back(), sizes + i});
    bytes.resize(bytes.size() - size_t(std::count(corrupt.begin(), corrupt.end(), i)));
    streams.emplace_back(bytes, i % 3);
    expected.emplace_back(int64_t(bits.size()));
    back.emplace_back(int64_t(bits.size()), i % 5);
    on_cpu.push_back({streams.back(), streams.back().size(), count_of(bits), expected.back(), size, segment});
    listed.push_back({streams.back(), streams.back().size(), count_of(bits), back.back(), size, segment});
  }
  simt::call(cuda::bitmap_code_encode, sources.data(), count);
  for (int i = 0; i < count; ++i) {
    const auto& stream = streams[size_t(i)];
    simt::expect_equal(sizes[i], written[size_t(i)].size(), "bitmap_code_encode of several: nbytes");
    simt::expect_equal(written[size_t(i)].get(), stream.get(), stream.size(), "bitmap_code_encode of several");
  }
  int32_t refused = 0;
  cpu::bitmap_code_decode(on_cpu.data(), count, true, &refused, 2);
  simt::expect_equal(refused, corrupt.empty() ? 0 : 1 + corrupt[0], "bitmap_code_decode of several: failed on the CPU");
  const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
  simt::call(cuda::bitmap_code_decode, listed.data(), count, true, failed);
  const int32_t reported = *failed.get();
  simt::expect_equal(reported > 0, refused > 0, "bitmap_code_decode of several: failed");
  simt::expect_equal(!refused || std::count(corrupt.begin(), corrupt.end(), reported - 1) > 0, true,
                     "bitmap_code_decode of several: which failed");
  for (int i = 0; i < count; ++i) {
    const std::vector<uint8_t> got(back[size_t(i)].get(), back[size_t(i)].get() + back[size_t(i)].size());
    if (std::count(corrupt.begin(), corrupt.end(), i))
      simt::expect_equal(count_of(got) != listed[size_t(i)].set, true, "bitmap_code_decode of several: another count");
    else
      simt::expect_equal(got.data(), bitmaps[size_t(i)].data(), int64_t(got.size()), "bitmap_code_decode of several");
  }
}

int main() {
  test_several(5000, 3, {});
  test_several(5000, 8, {2, 5});
  test_several(3001, 33, {16, 31, 32});  // more than one launch takes
  for (const int64_t n : simt::kSizes)
    for (unsigned seed = 0; seed < (n < 5000 ? 7 : 1); ++seed) test(random_bitmap(n, seed), n, segment_of(seed));
  for (const int64_t n : {63, 64, 65, 2047, 2048, 2049})
    test(random_bitmap(n, unsigned(n)), n, segment_of(unsigned(n)));
  if (!simt::kRaces) test(random_bitmap(64 * 4100, 0), 64 * 4100, 64);  // more segments than are summed up at a time
  for (int period = 2; period < (simt::kRaces ? 6 : 48); ++period)
    test(periodic_bitmap(2000, period, period / 2), 2000, kMostSegment);
  for (const int at : {0, 31, 32, 1023, 1024, 1500}) test(periodic_bitmap(1501, 2000, at), 1501, kMostSegment);
  for (unsigned seed = 0; seed < (simt::kRaces ? 12 : 180); ++seed) test_hostile(1 + seed * 37 % 2700, seed);
}
