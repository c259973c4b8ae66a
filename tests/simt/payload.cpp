// payload_seal and payload_inspect.
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

static Bytes sealed(Bytes bytes, const PayloadHeader& header) {
  cpu::payload_seal(bytes.data(), int64_t(bytes.size()), &header, nullptr, 0, nullptr, 1);
  return bytes;
}

static void test_seal(int64_t nbytes, std::vector<float> magnitudes, bool finite, const RangeFloat* number) {
  PayloadHeader header = header_of(nbytes);
  if (!finite) header.flags = kNonFinite;
  if (number) {
    const uint64_t wire = range_wire(*number);
    std::memcpy(header.fields + 8, &wire, 8);
  }
  const Bytes expected = sealed(body_of(nbytes), header);
  header = header_of(nbytes);
  Bytes on_cpu = body_of(nbytes);
  cpu::payload_seal(on_cpu.data(), nbytes, &header, magnitudes.data(), int64_t(magnitudes.size()), number, 1);
  simt::expect_equal(on_cpu.data(), expected.data(), nbytes, "payload_seal on the CPU");
  const simt::Buffer<float> on_device(magnitudes);
  simt::in_any_order(nbytes, [&] {
    const simt::Buffer<uint8_t> payload(body_of(nbytes));
    simt::call(cuda::payload_seal, payload, nbytes, &header, on_device, on_device.size(), number);
    simt::expect_equal(payload.get(), expected.data(), nbytes, "payload_seal");
  });
}

static void test_inspect(const std::vector<int64_t>& lengths) {
  Bytes all;
  std::vector<PayloadInspection> expected;
  for (int64_t nbytes : lengths) {
    const Bytes one = sealed(body_of(nbytes), header_of(nbytes));
    PayloadInspection entry{};
    std::memcpy(&entry.header, one.data(), sizeof entry.header);
    entry.begin = all.size();
    expected.push_back(entry);
    all.insert(all.end(), one.begin(), one.end());
  }
  const int64_t count = int64_t(lengths.size());
  const auto compare = [&](const simt::Buffer<uint8_t>& buffer, int64_t valid) {
    const simt::Buffer<PayloadInspection> on_cpu(count);
    cpu::payload_inspect(buffer, buffer.size(), count, on_cpu, 1);
    simt::in_any_order(buffer.size(), [&] {
      const simt::Buffer<PayloadInspection> table(count);
      cuda::payload_inspect(buffer, buffer.size(), count, table, nullptr);
      simt::expect_equal(table.get(), on_cpu.get(), count, "payload_inspect");
      for (int64_t r = 0; r < valid; ++r) {
        simt::expect_equal(table[r].header, expected[size_t(r)].header, "payload_inspect: header");
        simt::expect_equal(table[r].begin, expected[size_t(r)].begin, "payload_inspect: begin");
        simt::expect_equal(checksum_fold(table[r].sum), expected[size_t(r)].header.checksum, "payload_inspect: sum");
      }
      for (int64_t r = valid; r < count; ++r) simt::expect_equal(table[r].sum, uint64_t(0), "payload_inspect: beyond");
    });
  };
  compare(simt::Buffer<uint8_t>(all), count);
  if (count < 2) return;
  // The second payload claims too many bytes, fewer than a header, or a size that is not a multiple of 16.
  for (uint64_t claim : {uint64_t(all.size()), ~uint64_t(15), uint64_t(0), uint64_t(32), uint64_t(lengths[1] + 1)}) {
    Bytes spoilt = all;
    std::memcpy(&spoilt[size_t(lengths[0]) + offsetof(PayloadHeader, nbytes)], &claim, 8);
    compare(simt::Buffer<uint8_t>(spoilt), 1);
  }
  all.resize(size_t(lengths[0]) + 47);
  compare(simt::Buffer<uint8_t>(all), 1);
}

int main() {
  RangeFloat number;
  cpu::range_float_fit(&number, nullptr, 0, 10, 4, -1.0f, 3.0f, 1);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t nbytes : {48, 64, 80, 1024, 4096 + 16, 100000}) {
    test_seal(nbytes, {}, true, nullptr);
    test_seal(nbytes, {0.0f, 3e38f}, true, &number);
    test_seal(nbytes, {1.0f, inf}, false, &number);
    test_seal(nbytes, {nan}, false, nullptr);
  }
  test_inspect({});
  test_inspect({48});
  test_inspect({100000});
  test_inspect({48, 112, 64, 4096, 48});
  test_inspect(std::vector<int64_t>(1500, 48));
}
