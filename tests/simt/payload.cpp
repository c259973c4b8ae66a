// payload_seal, payload_inspect and payload_verify.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/payload.cu"

using namespace gradzip;

using Bytes = std::vector<uint8_t>;

static PayloadHeader header_of(int64_t nbytes) {
  PayloadHeader header{{'g', 'z'}, kPayloadVersion, 7, 0x12345678u, 99, uint64_t(nbytes), 0, 0, {}};
  for (int i = 0; i < 16; ++i) header.fields[i] = uint8_t(i + 1);
  return header;
}

static Bytes body_of(int64_t nbytes) {
  std::mt19937 random{unsigned(nbytes)};
  Bytes bytes(static_cast<size_t>(nbytes));
  for (auto& b : bytes) b = uint8_t(random());
  return bytes;
}

static Bytes sealed(Bytes bytes, PayloadSeal seal) {
  seal.payload = bytes.data();
  cpu::payload_seal(&seal, 1, 1);
  return bytes;
}

static PayloadSeal seal_of(const PayloadHeader& header) {
  return {nullptr, header, nullptr, 0, nullptr, nullptr, nullptr, 0, -1};
}

// CPU and CUDA seal with these results as if the header had had them, and zeros had followed the sections.
static void test_seal(int64_t nbytes, PayloadSeal seal, const PayloadHeader& expected_header, int64_t end) {
  Bytes body = body_of(nbytes);
  std::fill(body.begin() + end, body.end(), uint8_t(0));
  const Bytes expected = sealed(body, seal_of(expected_header));
  const Bytes on_cpu = sealed(body_of(nbytes), seal);
  simt::expect_equal(on_cpu.data(), expected.data(), nbytes, "payload_seal on the CPU");
  simt::in_any_order(nbytes, [&] {
    const simt::Buffer<uint8_t> payload(body_of(nbytes));
    seal.payload = payload;
    simt::call(cuda::payload_seal, &seal, 1);
    simt::expect_equal(payload.get(), expected.data(), nbytes, "payload_seal");
  });
}

static void test_magnitudes(int64_t nbytes, const std::vector<float>& magnitudes, bool finite, const RangeFloat* number,
                            const float* scale) {
  PayloadHeader expected = header_of(nbytes);
  if (!finite) expected.flags = kNonFinite;
  if (number) {
    const uint64_t wire = range_wire(*number);
    std::memcpy(expected.fields + 8, &wire, 8);
  }
  if (scale) std::memcpy(expected.fields, scale, 4);
  const simt::Buffer<float> values(magnitudes);
  const PayloadSeal seal{nullptr, header_of(nbytes), values, values.size(), number, scale, nullptr, 0, -1};
  test_seal(nbytes, seal, expected, nbytes);
}

static void test_stream(int64_t nbytes, int64_t begin, int64_t stream, int64_t padding_at) {
  PayloadHeader expected = header_of(nbytes);
  const bool valid = stream >= 0 && begin + stream <= nbytes;
  if (!valid) expected.flags = kNonFinite;
  const int64_t end = begin + (valid ? stream : 0), padding = (16 - end % 16) % 16;
  expected.flags |= uint32_t(nbytes - end - padding) / 16 << 8;
  if (padding_at >= 0) expected.fields[padding_at] = uint8_t(padding);
  const PayloadSeal seal{nullptr, header_of(nbytes), nullptr, 0, nullptr, nullptr, &stream, begin, padding_at};
  test_seal(nbytes, seal, expected, end);
}

// Many payloads in one call, as each alone. The table exceeds what one launch takes to the device.
static void test_seal_all(const std::vector<int64_t>& lengths) {
  const simt::Buffer<float> magnitudes(std::vector<float>{1.0f, NAN});
  std::vector<PayloadSeal> table;
  std::vector<Bytes> expected;
  int64_t all = 0;
  for (int64_t nbytes : lengths) {
    table.push_back(seal_of(header_of(nbytes)));
    table.back().magnitudes = magnitudes;
    table.back().magnitude_count = int64_t(table.size() % 3);
    expected.push_back(sealed(body_of(nbytes), table.back()));
    all += nbytes;
  }
  const auto seal_with = [&](auto kernel) {
    std::vector<simt::Buffer<uint8_t>> payloads;
    for (size_t i = 0; i < lengths.size(); ++i) {
      payloads.emplace_back(body_of(lengths[i]), int64_t(i % 5));
      table[i].payload = payloads.back();
    }
    kernel(table.data(), int64_t(table.size()));
    for (size_t i = 0; i < lengths.size(); ++i)
      simt::expect_equal(payloads[i].get(), expected[i].data(), lengths[i], "payload_seal of several");
  };
  seal_with([](const PayloadSeal* table, int64_t count) { cpu::payload_seal(table, count, 2); });
  simt::in_any_order(all, [&] {
    seal_with([](const PayloadSeal* table, int64_t count) { simt::call(cuda::payload_seal, table, count); });
  });
}

static void test_inspect(const std::vector<std::vector<int64_t>>& lengths) {
  std::vector<Bytes> buffers;
  std::vector<PayloadInspection> expected;
  const int64_t count = int64_t(lengths.size()), each = int64_t(lengths[0].size());
  for (const auto& of_buffer : lengths) {
    buffers.emplace_back();
    for (int64_t nbytes : of_buffer) {
      const Bytes one = sealed(body_of(nbytes), seal_of(header_of(nbytes)));
      PayloadInspection entry{};
      std::memcpy(&entry.header, one.data(), sizeof entry.header);
      entry.begin = buffers.back().size();
      expected.push_back(entry);
      buffers.back().insert(buffers.back().end(), one.begin(), one.end());
    }
  }
  const auto compare = [&](const std::vector<Bytes>& all, int64_t valid) {
    std::vector<simt::Buffer<uint8_t>> exact;
    std::vector<PayloadBuffer> list;
    int64_t nbytes = 0;
    for (const Bytes& bytes : all) {
      exact.emplace_back(bytes, int64_t(exact.size()) % 3);
      list.push_back({exact.back(), exact.back().size()});
      nbytes += exact.back().size();
    }
    const simt::Buffer<PayloadInspection> on_cpu(count * each);
    cpu::payload_inspect(list.data(), count, each, on_cpu, 1);
    simt::in_any_order(nbytes, [&] {
      const simt::Buffer<PayloadInspection> table(count * each);
      cuda::payload_inspect(list.data(), count, each, table, nullptr);
      simt::expect_equal(table.get(), on_cpu.get(), count * each, "payload_inspect");
      for (int64_t r = 0; r < valid; ++r) {
        simt::expect_equal(table[r].header, expected[size_t(r)].header, "payload_inspect: header");
        simt::expect_equal(table[r].begin, expected[size_t(r)].begin, "payload_inspect: begin");
        simt::expect_equal(checksum_fold(table[r].sum), expected[size_t(r)].header.checksum, "payload_inspect: sum");
      }
      for (int64_t r = valid; r < (count > 1 ? valid : each); ++r)
        simt::expect_equal(table[r].sum, uint64_t(0), "payload_inspect: beyond");
    });
  };
  compare(buffers, count * each);
  if (each < 2) return;
  // The second payload claims too many bytes, fewer than a header, or a size that is not a multiple of 16.
  const std::vector<int64_t>& first = lengths[0];
  for (uint64_t claim :
       {uint64_t(buffers[0].size()), ~uint64_t(15), uint64_t(0), uint64_t(32), uint64_t(first[1] + 1)}) {
    std::vector<Bytes> spoilt = buffers;
    std::memcpy(&spoilt[0][size_t(first[0]) + offsetof(PayloadHeader, nbytes)], &claim, 8);
    compare(spoilt, 1);
  }
  buffers[0].resize(size_t(first[0]) + 47);
  compare(buffers, 1);
}

// Payloads of these lengths, of which change(bytes, i) changes payload i and returns whether it is still as expected.
template <class Change>
static void test_verify(const std::vector<int64_t>& lengths, Change change) {
  std::vector<simt::Buffer<uint8_t>> payloads;
  std::vector<PayloadExpectation> expected;
  std::vector<PayloadBuffer> list;
  std::vector<float> wanted;
  const int64_t count = int64_t(lengths.size());
  int64_t all = 0;
  for (int64_t i = 0; i < count; ++i) {
    const PayloadHeader header = header_of(lengths[size_t(i)]);
    Bytes bytes = sealed(body_of(lengths[size_t(i)]), seal_of(header));
    const bool valid = change(bytes, i);
    payloads.emplace_back(bytes, i % 5);
    list.push_back({payloads.back(), payloads.back().size()});
    PayloadExpectation of{payloads.back(), payloads.back().size(), header.numel, header.digest, 0, 0};
    of.codec |= uint64_t(header.method) << 32 | uint64_t(i % 2 ? 0xfffeu : 0u) << 48;  // the first byte may be any
    std::memcpy(&of.first_fields, header.fields, 8);
    std::memcpy(&of.last_fields, header.fields + 8, 8);
    of.first_fields ^= 0x80;
    expected.push_back(of);
    wanted.push_back(valid ? 0.0f : bits_float(0x7fc00000u));
    all += lengths[size_t(i)];
  }
  const simt::Buffer<PayloadInspection> inspected(count);
  cpu::payload_inspect(list.data(), count, 1, inspected, 1);
  const auto compare = [&](auto verify, const std::string& what) {
    const simt::Buffer<PayloadInspection> table(count);
    const simt::Buffer<float> numbers(count);
    verify(expected.data(), count, table, numbers);
    simt::expect_equal(table.get(), inspected.get(), count, what + ": the table");
    simt::expect_equal(numbers.get(), wanted.data(), count, what + ": the numbers");
  };
  const auto on_cpu = [](const PayloadExpectation* expected, int64_t n, PayloadInspection* table, float* numbers) {
    cpu::payload_verify(expected, n, table, numbers, 2);
  };
  compare(on_cpu, "payload_verify on the CPU");
  simt::in_any_order(all, [&] {
    const auto verify = [](const PayloadExpectation* expected, int64_t n, PayloadInspection* table, float* numbers) {
      cuda::payload_verify(expected, n, table, numbers, nullptr);
    };
    compare(verify, "payload_verify");
  });
}

static void test_verify_all() {
  const auto untouched = [](Bytes&, int64_t) { return true; };
  const auto reseal = [](Bytes& bytes) {
    PayloadHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    bytes = sealed(bytes, seal_of(header));
  };
  test_verify({}, untouched);
  test_verify({48, 64, 100000, 4096 + 16, 16384, 16384 + 48}, untouched);
  test_verify(std::vector<int64_t>(150, 64), untouched);  // more than one launch takes
  std::mt19937 random(5);
  std::vector<int64_t> lengths;
  for (int i = 0; i < (simt::kRaces ? 8 : 40); ++i)
    for (int64_t n : {48, 64, 1024, 70000 - 70000 % 16}) lengths.push_back(n);
  test_verify(lengths, [&](Bytes& bytes, int64_t) {
    if (random() % 2) return true;
    bytes[random() % bytes.size()] ^= uint8_t(1u << random() % 8);
    return false;
  });
  test_verify(lengths, [&](Bytes& bytes, int64_t) {  // not a payload, or one with other bytes behind it
    bytes.resize(random() % 3 ? random() % bytes.size() : bytes.size() + 1 + random() % 64);
    return false;
  });
  test_verify(lengths, [&](Bytes& bytes, int64_t i) {  // headers that lie, with the right checksum
    const size_t at = random() % sizeof(PayloadHeader);
    const bool of_size = at / 8 == kNbytesAt / 8, of_checksum = at / 4 == kChecksumAt / 4;
    if (of_size) {  // sealed as if it were true
      const uint64_t claims[] = {0, 16, 47, 32, ~uint64_t(15), bytes.size() + 16, bytes.size() - 8};
      std::memcpy(&bytes[kNbytesAt], &claims[random() % std::size(claims)], 8);
      return false;
    }
    bytes[at] ^= 0x84;  // no flag that is known
    if (!of_checksum) reseal(bytes);
    const bool free_field = at >= 32 && (i % 2 == 0 || at == 32);
    const uint64_t slack = at == 29 ? 0x84 : at == 30 ? 0x8400 : 0x840000;
    const bool flags = at == 28 || (at > 28 && at < 32 && 48 + 16 * slack <= bytes.size());
    return !of_checksum && (free_field || flags);
  });
  test_verify(lengths, [&](Bytes& bytes, int64_t) {
    bytes[28] |= uint8_t(kNonFinite);
    reseal(bytes);
    return false;
  });
}

int main() {
  test_verify_all();
  RangeFloat number;
  const RangeFit fit{&number, nullptr, 0};
  cpu::range_float_fit(&fit, 1, 10, 4, -1.0f, 3.0f, 1);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN(), scale = 0.3f;
  for (int64_t nbytes : {48, 64, 80, 1024, 4096 + 16, 100000}) {
    test_magnitudes(nbytes, {}, true, nullptr, nullptr);
    test_magnitudes(nbytes, {0.0f, 0x1p127f}, true, &number, nullptr);
    test_magnitudes(nbytes, {0.0f, 0x1.000002p127f}, false, &number, nullptr);
    test_magnitudes(nbytes, {1.0f, inf}, false, &number, &scale);
    test_magnitudes(nbytes, {nan}, false, nullptr, &scale);
    for (int64_t begin : {int64_t(48), int64_t(51), nbytes - 3})
      for (int64_t stream : {int64_t(-1), int64_t(0), int64_t(1), nbytes / 3, nbytes - 64, nbytes - 48, nbytes})
        if (begin >= 48 && begin <= nbytes) test_stream(nbytes, begin, stream, stream % 2 ? 7 : -1);
  }
  test_seal_all({});
  test_seal_all({48, 100000, 64, 16384 + 48, 16384});
  test_seal_all(std::vector<int64_t>(70, 64));
  test_inspect({{}});
  test_inspect({{48}});
  test_inspect({{100000}});
  test_inspect({{48, 112, 64, 4096, 48}});
  test_inspect({std::vector<int64_t>(1500, 48)});
  test_inspect({{48, 4096}, {64, 48}, {10000, 112}});
  test_inspect(std::vector<std::vector<int64_t>>(150, {48}));
}
