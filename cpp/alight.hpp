// Early exit in C++17: reads a folder that `alight export` wrote, runs its ONNX stages by ONNX Runtime, and decides
// where each sample leaves as Python does, single samples and batches with compaction.
//
//     alight::Predictor predictor("exported");                        // needs libonnxruntime.so, no headers of it
//     alight::Decision one = predictor(predictor.normalised(pixels, {1, 32, 32, 3}), number)[0];
//
// `number` counts the samples of a program, 0, 1, 2, ...: ties and mixtures are decided by it, so that the budget is kept.
//
// The interface is Predictor, Input, Decision and Error, which is thrown by whatever is refused; the rest may change. A
// predictor can be moved, and threads may share it: calls change nothing in it. A call that throws decides no sample.
//
// Policies that decide sample by sample run here: Threshold, Patience, Streak, ExitAt, Lottery and Mixture, on single
// answers, votes and gains. Others are refused. ONNX Runtime is loaded when the program runs, by its C interface, whose
// function table only ever grows: 1.17 will do, or a newer one where the files need it.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <locale>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "alight.hpp looks for NaN and infinity, which -ffast-math and -Ofast assume away: compile without them"
#endif

namespace alight {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---------------------------------------------------------------------------------------------- JSON and files

class Json {
 public:
  static Json parsed(const std::string& text) {
    const char *at = text.data(), *end = at + text.size();
    Json value = read(at, end, 0);
    while (at < end)
      if (!is_space(*at++)) fail();
    return value;
  }
  const Json& operator[](const std::string& name) const {
    auto found = members.find(name);
    if (found == members.end()) throw Error("the file lacks \"" + name + "\": export the network again");
    return found->second;
  }
  bool is_null() const { return kind == Kind::null; }
  double number() const {
    if (kind == Kind::text && (text_ == "never" || text_ == "always"))  // infinite thresholds
      return (text_ == "never" ? 1 : -1) * std::numeric_limits<double>::infinity();
    if (kind != Kind::number) throw Error("the file has something else where a number is expected: export the network again");
    return number_;
  }
  int64_t integer() const {
    constexpr double LARGEST = 9007199254740991;  // up to it doubles hold every whole number
    double value = number();
    if (!(std::abs(value) <= LARGEST) || value != std::floor(value))
      throw Error("the file has something else where a whole number is expected: export the network again");
    return static_cast<int64_t>(value);
  }
  const std::string& text() const {
    if (kind != Kind::text) throw Error("the file has something else where a text is expected: export the network again");
    return text_;
  }
  template <class T = double>
  std::vector<T> numbers() const {
    if (kind != Kind::list) throw Error("the file has something else where a list is expected: export the network again");
    std::vector<T> made;
    for (const Json& each : items)
      if constexpr (std::is_integral_v<T>) made.push_back(static_cast<T>(each.integer()));
      else made.push_back(static_cast<T>(each.number()));
    return made;
  }
  std::vector<Json> items;             // of a list
  std::map<std::string, Json> members;  // of an object

 private:
  enum class Kind { null, boolean, number, text, list, object };
  Kind kind = Kind::null;
  double number_ = 0;
  std::string text_;

  [[noreturn]] static void fail() { throw Error("the file is not JSON: export the network again"); }
  static bool is_space(char each) { return each == ' ' || each == '\n' || each == '\t' || each == '\r'; }
  static void skip(const char*& at, const char* end) {
    while (at < end && is_space(*at)) ++at;
    if (at == end) fail();
  }
  static void expect(const char*& at, const char* end, char wanted) {
    skip(at, end);
    if (*at++ != wanted) fail();
  }
  static Json read(const char*& at, const char* end, int depth) {
    constexpr int DEEPEST = 64;
    if (depth > DEEPEST) fail();
    skip(at, end);
    Json value;
    if (*at == '{' || *at == '[') {
      bool object = *at++ == '{';
      value.kind = object ? Kind::object : Kind::list;
      for (skip(at, end); *at != (object ? '}' : ']'); skip(at, end)) {
        if (!value.items.empty() || !value.members.empty()) expect(at, end, ',');
        if (object) {
          skip(at, end);
          std::string name = string(at, end);
          expect(at, end, ':');
          value.members.insert_or_assign(std::move(name), read(at, end, depth + 1));  // the last counts, as in Python
        } else {
          value.items.push_back(read(at, end, depth + 1));
        }
      }
      ++at;
    } else if (*at == '"') {
      value.kind = Kind::text;
      value.text_ = string(at, end);
    } else if (*at == 't' || *at == 'f' || *at == 'n') {
      value.kind = *at == 'n' ? Kind::null : Kind::boolean;
      const std::string word = *at == 'n' ? "null" : *at == 't' ? "true" : "false";
      if (static_cast<size_t>(end - at) < word.size() || word.compare(0, word.size(), at, word.size())) fail();
      at += word.size();
    } else {
      value.kind = Kind::number;
      std::string digits(at, std::find_if(at, end, [](char each) { return !std::strchr("+-.0123456789eE", each); }));
      std::istringstream stream(digits);  // from_chars reads no floating-point numbers in several standard libraries
      stream.imbue(std::locale::classic());
      if (!(stream >> value.number_) || stream.peek() != std::char_traits<char>::eof()) fail();
      at += digits.size();
    }
    return value;
  }
  static uint32_t code_unit(const char*& at, const char* end) {  // of "u" and four hexadecimal digits
    uint32_t code = 0;
    if (end - at < 5 || std::from_chars(at + 1, at + 5, code, 16).ptr != at + 5) fail();
    at += 5;
    return code;
  }
  static std::string string(const char*& at, const char* end) {
    expect(at, end, '"');
    std::string made;
    while (at < end && *at != '"') {
      char each = *at++;
      if (each != '\\') {
        made += each;
      } else if (at < end && *at == 'u') {
        uint32_t code = code_unit(at, end);
        if (code >> 10 == 0x36 && end - at > 1 && *at == '\\' && at[1] == 'u')  // the first of two that are one character
          code = 0x10000 + ((code & 0x3FF) << 10) + (code_unit(++at, end) & 0x3FF);
        int further = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  // bytes of UTF-8 after the first
        constexpr std::array<uint32_t, 4> FIRST{0, 0xC0, 0xE0, 0xF0};
        made += static_cast<char>(FIRST[static_cast<size_t>(further)] | code >> 6 * further);
        while (further--) made += static_cast<char>(0x80 | (code >> 6 * further & 63));
      } else if (at < end) {
        const char* known = *at ? std::strchr("n\nt\tr\rb\bf\f", *at) : nullptr;  // pairs: written, meant
        made += known && *at != '\n' ? known[1] : *at;
        ++at;
      }
    }
    expect(at, end, '"');
    return made;
  }
};

// The content of a file that alight wrote as this kind; what a newer one wrote may mean something else.
inline Json read_kind(const std::string& text, const std::string& kind) {
  constexpr int64_t SCHEMA = 1;
  Json content = Json::parsed(text);
  if (content["alight"].text() != kind) throw Error("the file is not a " + kind + " of alight: export the network again");
  if (content["schema"].integer() != SCHEMA)
    throw Error("the " + kind + " is of another version of alight: export the network again, or use its alight.hpp");
  return content;
}

inline std::string file_content(const std::string& path, const std::string& remedy) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) throw Error("there is no file " + path + ": " + remedy);
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path, ignored))
    throw Error("cannot read " + path + ": give a file that this user may read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline std::string manifest_content(const std::string& folder) {
  const std::string remedy = "give a folder that `alight export` wrote";
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) throw Error("there is no folder " + folder + ": " + remedy);
  return file_content(folder + "/manifest.json", remedy);
}

// SHA-256 of a file's content, in hexadecimal digits (FIPS 180-4).
inline std::string sha256(const std::string& content) {
  auto root_bits = [](double root) { return static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0); };
  std::array<uint32_t, 64> constants{};
  std::array<uint32_t, 8> state{};
  for (uint32_t number = 2, found = 0; found < 64; ++number) {
    bool prime = true;
    for (uint32_t other = 2; other * other <= number; ++other) prime = prime && number % other;
    if (!prime) continue;
    if (found < 8) state[found] = root_bits(std::sqrt(static_cast<double>(number)));
    constants[found++] = root_bits(std::cbrt(static_cast<double>(number)));
  }
  std::string padded = content + '\x80';
  padded.append((120 - padded.size() % 64) % 64, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) padded += static_cast<char>(content.size() * 8ull >> shift & 255);
  auto turned = [](uint32_t value, int by) { return value >> by | value << (32 - by); };
  for (size_t start = 0; start < padded.size(); start += 64) {
    std::array<uint32_t, 64> words{};
    for (size_t i = 0; i < 64; ++i) words[i / 4] = words[i / 4] << 8 | static_cast<uint8_t>(padded[start + i]);
    for (size_t i = 16; i < 64; ++i) {
      uint32_t a = words[i - 15], b = words[i - 2];
      words[i] = words[i - 16] + words[i - 7] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) +
                 (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t i = 0; i < 64; ++i) {
      uint32_t one = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + constants[i] + words[i];
      uint32_t two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    std::array<uint32_t, 8> mixed{a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += mixed[i];
  }
  std::string digits;
  for (uint32_t word : state)
    for (int shift = 28; shift >= 0; shift -= 4) digits += "0123456789abcdef"[word >> shift & 15];
  return digits;
}

inline std::string verified(const std::string& folder, const std::string& file, const std::string& expected) {
  std::string content = file_content(folder + "/" + file, "export the network again");
  if (sha256(content) != expected) throw Error(folder + "/" + file + " was changed or damaged: export it again");
  return content;
}

// Where a Protobuf number below 128 starts that ends before `end`, however long it is written, or npos. What does not
// fit into 32 bits is dropped from the fifth byte of a tag, though not of a length.
inline size_t varint_start(const std::string& content, size_t end, char value, bool tag) {
  if (end == 0 || end == std::string::npos) return std::string::npos;
  size_t at = end - 1;
  char last = content[at];
  if (last == value) return at;
  while (at > 0 && content[at - 1] == '\x80') --at;
  bool padded = last == 0 || (tag && end - 1 - at == 3 && (last & 0x8F) == 0);
  return padded && at > 0 && content[at - 1] == static_cast<char>(value | 0x80) ? at - 1 : std::string::npos;
}

// Refuses a stage that reads its weights from another file: a Protobuf field 1 with the text "location".
inline void check_whole(const std::string& content, const std::string& name) {
  const std::string key = "location";
  for (size_t at = content.find(key); at != std::string::npos; at = content.find(key, at + 1))
    if (varint_start(content, varint_start(content, at, 8, false), 10, true) != std::string::npos)
      throw Error(name + " names another file for its weights, which nothing verifies: export it in one file");
}

// ---------------------------------------------------------------------------------------------- ONNX Runtime

// ONNX Runtime's C interface: places in its function table, which never change.
class Runtime {
 public:
  using Handle = void*;
  explicit Runtime(const std::string& library) {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    Handle opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!opened) throw Error("cannot load " + library + " (" + dlerror() + "): give the path of ONNX Runtime's library");
    struct Base {
      const Handle* (*table)(uint32_t);
      const char* (*version)();
    };
    auto base = reinterpret_cast<const Base* (*)()>(dlsym(opened, "OrtGetApiBase"));
    table_ = base ? base()->table(OLDEST) : nullptr;
    if (!table_) throw Error(library + " is not ONNX Runtime 1.17 or newer: give the path of such a library");
    constexpr int QUIET = 4;  // errors are thrown
    call<int, const char*, Handle*>(3, QUIET, "alight", &environment);
    call<int, int, Handle*>(69, ARENA, DEFAULT_MEMORY, &memory);
    call<Handle*>(78, &allocator);
  }
  Runtime(const Runtime&) = delete;
  ~Runtime() {
    release(94, memory);
    release(92, environment);
  }
  // Calls the function at a place of the table, and throws what it complains about.
  template <class... Taken>
  void call(int place, Taken... given) const {
    Handle status = reinterpret_cast<Handle (*)(Taken...)>(table_[place])(given...);
    if (!status) return;
    std::string message = reinterpret_cast<const char* (*)(Handle)>(table_[2])(status);
    release(93, status);
    throw Error(message);
  }
  void release(int place, Handle what) const {
    if (what) reinterpret_cast<void (*)(Handle)>(table_[place])(what);
  }
  Handle environment = nullptr, memory = nullptr, allocator = nullptr;

 private:
  static constexpr uint32_t OLDEST = 17;
  static constexpr int ARENA = 1, DEFAULT_MEMORY = 0;
  const Handle* table_ = nullptr;
};

struct ElementType {
  const char* name;
  size_t bytes;  // of one number; 0 where it is not read here
};

// Element types by ONNX's codes, which are their places.
constexpr std::array<ElementType, 17> ELEMENT_TYPES{{{"no tensor", 0}, {"float32", 4}, {"uint8", 1}, {"int8", 1},
                                                     {"uint16", 0}, {"int16", 0}, {"int32", 4}, {"int64", 8}, {"text", 0},
                                                     {"bool", 1}, {"float16", 0}, {"float64", 8}, {"uint32", 0},
                                                     {"uint64", 0}, {"complex64", 0}, {"complex128", 0}, {"bfloat16", 0}}};

inline int code_of(const std::string& dtype) {
  for (size_t code = 0; code < ELEMENT_TYPES.size(); ++code)
    if (ELEMENT_TYPES[code].bytes && ELEMENT_TYPES[code].name == dtype) return static_cast<int>(code);
  throw Error("tensors of " + dtype + " are not known here: run the network in Python");
}

inline size_t bytes_of(const std::string& dtype) { return ELEMENT_TYPES[static_cast<size_t>(code_of(dtype))].bytes; }

// As Python writes it: (samples, 3, any), or (5, 3, 64) of a tensor that was given.
inline std::string shape_text(const std::vector<int64_t>& shape, bool given) {
  std::string made;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    std::string size = shape[axis] < 0 ? "any" : std::to_string(shape[axis]);
    made += (axis ? ", " : "") + (axis || given ? size : "samples");
  }
  return "(" + made + (shape.size() == 1 ? ",)" : ")");
}

struct Spec {  // of a tensor: -1 stands for a size that may differ
  std::string name, dtype;
  std::vector<int64_t> shape;
  explicit Spec(const Json& content) : name(content["name"].text()), dtype(content["dtype"].text()) {
    for (const Json& size : content["shape"].items) shape.push_back(size.is_null() ? -1 : size.integer());
    code_of(dtype);
    bool usable = !shape.empty() && shape[0] == -1;
    for (size_t axis = 1; axis < shape.size(); ++axis)
      usable = usable && (content["shape"].items[axis].is_null() || shape[axis] > 0);
    if (!usable) throw Error("the tensor " + name + " has an unusable shape: export the network again");
  }
  bool fits(const std::vector<int64_t>& given) const {
    bool same = given.size() == shape.size() && given[0] > 0;
    for (size_t axis = 0; same && axis < shape.size(); ++axis)
      same = shape[axis] < 0 ? given[axis] > 0 : shape[axis] == given[axis];
    return same;
  }
  bool fits_channels_last(const std::vector<int64_t>& given) const {
    return given.size() == 4 && fits({given[0], given[3], given[1], given[2]});
  }
  [[noreturn]] void refuse(const std::vector<int64_t>& given) const {
    std::vector<int64_t> batch = given;
    batch.insert(batch.begin(), 1);
    std::string remedy = "give that shape, or export the network with an example of yours";
    if (fits_channels_last(given)) remedy = "put the channels first";
    else if (fits(batch) || fits_channels_last(batch)) remedy = "give a batch, of one sample " + shape_text(batch, true);
    throw Error("an input of shape " + shape_text(given, true) + ", and the network takes " + name + " of shape " +
                shape_text(shape, false) + ", " + dtype + ": " + remedy);
  }
};

inline size_t count_of(const std::vector<int64_t>& shape) {
  size_t made = 1;
  for (int64_t size : shape) made *= static_cast<size_t>(size);
  return made;
}

// A tensor with one row per sample, in memory of its own or of somebody else.
class Tensor {
 public:
  Tensor(const Runtime& runtime, const std::string& dtype, std::vector<int64_t> shape, const void* given = nullptr)
      : runtime_(&runtime), shape_(std::move(shape)) {
    size_t bytes = bytes_of(dtype) * count_of(shape_);
    if (!given) own_.reset(new char[bytes]);
    data_ = given ? const_cast<char*>(static_cast<const char*>(given)) : own_.get();
    runtime.call<void*, void*, size_t, const int64_t*, size_t, int, void**>(
        49, runtime.memory, data_, bytes, shape_.data(), shape_.size(), code_of(dtype), &value_);
  }
  Tensor(const Runtime& runtime, void* value) : runtime_(&runtime), value_(value) {  // that ONNX Runtime made
    void* info = nullptr;
    size_t axes = 0;
    runtime.call<void*, void**>(65, value, &info);
    runtime.call<void*, size_t*>(61, info, &axes);
    shape_.resize(axes);
    runtime.call<void*, int64_t*, size_t>(62, info, shape_.data(), axes);
    runtime.release(99, info);
    runtime.call<void*, void**>(51, value, reinterpret_cast<void**>(&data_));
  }
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(runtime_, other.runtime_);
    std::swap(value_, other.value_);
    std::swap(shape_, other.shape_);
    std::swap(own_, other.own_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Tensor() {
    if (runtime_) runtime_->release(96, value_);
  }
  // The rows of survivors, compacted into new memory.
  Tensor taken(const std::vector<size_t>& rows, const std::string& dtype) const {
    std::vector<int64_t> shape = shape_;
    shape[0] = static_cast<int64_t>(rows.size());
    Tensor made(*runtime_, dtype, shape);
    size_t row = bytes_of(dtype);
    for (size_t axis = 1; axis < shape.size(); ++axis) row *= static_cast<size_t>(shape[axis]);
    for (size_t to = 0; to < rows.size(); ++to) std::memcpy(made.data_ + to * row, data_ + rows[to] * row, row);
    return made;
  }
  const std::vector<int64_t>& shape() const { return shape_; }
  template <class T>
  const T* data() const {
    return reinterpret_cast<const T*>(data_);
  }
  void* value() const { return value_; }

 private:
  const Runtime* runtime_ = nullptr;
  void* value_ = nullptr;
  std::vector<int64_t> shape_;
  std::unique_ptr<char[]> own_;
  char* data_ = nullptr;
};

using State = std::vector<Tensor>;

// One stage: takes the state, gives logits and the next state.
class Session {
 public:
  Session(std::shared_ptr<const Runtime> runtime, const std::string& content, const std::string& name, int threads)
      : runtime_(std::move(runtime)), name_(name) {
    void* options = nullptr;
    runtime_->call<void**>(10, &options);
    std::unique_ptr<void, std::function<void(void*)>> kept(options, [&](void* each) { runtime_->release(100, each); });
    runtime_->call<void*, int>(24, options, threads);
    runtime_->call<void*, int>(25, options, 1);
    // threads of one stage must not keep a core busy while the next one works
    runtime_->call<void*, const char*, const char*>(130, options, "session.force_spinning_stop", "1");
    try {
      runtime_->call<void*, const void*, size_t, void*, void**>(8, runtime_->environment, content.data(), content.size(),
                                                                options, &session_);
    } catch (const Error& error) {
      throw Error("ONNX Runtime cannot load " + name_ + first_line(error) + ": use a newer one, or export it again");
    }
    read_names(30, 36, inputs_);
    read_names(31, 37, outputs_);
    for (size_t index = 0; index < outputs_.size(); ++index) types_.push_back(output_type(index));
  }
  Session(const Session&) = delete;
  ~Session() { runtime_->release(95, session_); }

  size_t takes() const { return inputs_.size(); }
  const std::vector<int>& gives() const { return types_; }  // element types of the outputs, by ONNX's codes
  State operator()(const State& state) const {
    std::vector<const char*> inputs = pointers(inputs_), outputs = pointers(outputs_);
    std::vector<void*> given, made(outputs.size(), nullptr);
    for (const Tensor& each : state) given.push_back(each.value());
    try {
      runtime_->call<void*, void*, const char* const*, void* const*, size_t, const char* const*, size_t, void**>(
          9, session_, nullptr, inputs.data(), given.data(), given.size(), outputs.data(), outputs.size(), made.data());
    } catch (const Error& error) {
      throw Error(name_ + " cannot take these " + std::to_string(state[0].shape()[0]) + " samples" + first_line(error) +
                  ": look for indices of tokens that the network does not know, or for texts that are too long");
    }
    State found;
    for (void* each : made) found.emplace_back(*runtime_, each);
    bool fits = found[0].shape().size() == 2 && found[0].shape()[1] > 0;
    for (const Tensor& each : found) fits = fits && !each.shape().empty() && each.shape()[0] == state[0].shape()[0];
    if (!fits) throw Error("a stage does not give a row of logits for each sample: export the network again");
    return found;
  }

 private:
  void read_names(int count_place, int name_place, std::vector<std::string>& names) {
    size_t count = 0;
    runtime_->call<void*, size_t*>(count_place, session_, &count);
    for (size_t index = 0; index < count; ++index) {
      char* name = nullptr;
      runtime_->call<void*, size_t, void*, char**>(name_place, session_, index, runtime_->allocator, &name);
      names.emplace_back(name);
      runtime_->call<void*, void*>(76, runtime_->allocator, name);
    }
  }
  int output_type(size_t index) const {
    void* info = nullptr;
    const void* tensor = nullptr;  // stays null where the output is a list or a map
    int code = 0;
    runtime_->call<void*, size_t, void**>(34, session_, index, &info);
    std::unique_ptr<void, std::function<void(void*)>> kept(info, [&](void* each) { runtime_->release(98, each); });
    runtime_->call<const void*, const void**>(55, info, &tensor);
    if (tensor) runtime_->call<const void*, int*>(60, tensor, &code);
    return code;
  }
  static std::string first_line(const Error& error) {
    std::string text = error.what();
    return " (" + text.substr(0, text.find('\n')) + ")";
  }
  static std::vector<const char*> pointers(const std::vector<std::string>& names) {
    std::vector<const char*> made;
    for (const std::string& each : names) made.push_back(each.c_str());
    return made;
  }
  const std::shared_ptr<const Runtime> runtime_;
  const std::string name_;  // of its file
  void* session_ = nullptr;
  std::vector<std::string> inputs_, outputs_;
  std::vector<int> types_;
};

// ---------------------------------------------------------------------------------------------- scores and policies

constexpr std::array<const char*, 4> SCORES{"margin", "max_probability", "logit_margin", "negative_entropy"};

struct HeadValues {  // of one sample at one exit
  int64_t prediction;
  double largest, probability = 0;  // largest logit, probability of its class
  std::vector<double> scores;
};

// The sum, added in NumPy's order: scores near 1 differ in their last bits alone, so that these must be the same.
inline double sum_of(const double* numbers, size_t count) {
  constexpr size_t LANES = 8, BLOCK = 128;
  if (count > BLOCK) {
    size_t half = count / 2 / LANES * LANES;
    return sum_of(numbers, half) + sum_of(numbers + half, count - half);
  }
  if (count < LANES) return std::accumulate(numbers, numbers + count, 0.0);
  std::array<double, LANES> lanes{};
  for (size_t each = 0; each < count / LANES * LANES; ++each) lanes[each % LANES] += numbers[each];
  for (size_t step = 1; step < LANES; step *= 2)
    for (size_t lane = 0; lane < LANES; lane += 2 * step) lanes[lane] += lanes[lane + step];
  return std::accumulate(numbers + count / LANES * LANES, numbers + count, lanes[0]);
}

// Class, its probability and these scores from logits, in double precision; NaN as the largest if one is NaN.
inline HeadValues head_values(const float* logits, size_t classes, const std::vector<std::string>& scores) {
  const float* best = std::max_element(logits, logits + classes);
  HeadValues made{best - logits, *best, 0, {}};
  double second = 0, second_logit = -std::numeric_limits<double>::infinity();
  std::vector<double> weights(classes);
  for (size_t each = 0; each < classes; ++each) {
    double logit = logits[each];
    if (std::isnan(logit)) return {0, logit, 0, {}};
    weights[each] = std::exp(logit - made.largest);
    if (logits + each == best) continue;
    second = std::max(second, weights[each]);
    second_logit = std::max(second_logit, logit);
  }
  double total = sum_of(weights.data(), classes);
  made.probability = 1.0 / total;
  for (const std::string& score : scores) {
    if (score == "max_probability") made.scores.push_back(made.probability);
    else if (score == "margin") made.scores.push_back(made.probability - second / total);
    else if (score == "logit_margin") made.scores.push_back(made.largest - second_logit);
    else {
      std::vector<double> terms(classes);
      for (size_t each = 0; each < classes; ++each)
        if (double share = weights[each] / total; share > 0) terms[each] = share * std::log(share);
      made.scores.push_back(sum_of(terms.data(), classes));
    }
  }
  return made;
}

// A number below 2^32 for a sample's number, the same in every language; each purpose draws anew.
inline uint32_t hash32(int64_t sample, uint64_t salt, uint64_t purpose) {
  constexpr uint64_t ALL = 0xFFFFFFFF;
  uint64_t low = salt & ALL, high = salt >> 32, number = static_cast<uint64_t>(sample);
  uint64_t mixed = (((number & ALL) ^ static_cast<uint64_t>(sample >> 32)) + low + 0x9E3779B9 * (purpose + 1)) & ALL;
  mixed = ((mixed >> 16 ^ mixed) * 0x7FEB352D & ALL) ^ high;
  mixed = (mixed >> 16 ^ mixed) * 0x31848BAB & ALL;
  return static_cast<uint32_t>(mixed >> 15 ^ mixed);
}

inline bool hashed_below(int64_t sample, double share, uint64_t salt, uint64_t purpose) {
  return hash32(sample, salt, purpose) < std::ceil(share * 4294967296.0);
}

struct Ties {
  double lowest, highest;
};

// The scores tied with a threshold: equal to it but for rounding. The numbers are those of tie_range in Python, bit by
// bit, since a quotient is never fused with a difference, as a product may be.
inline Ties tie_range(double threshold) {
  if (std::isinf(threshold)) return {threshold, threshold};
  double reach = threshold <= 0 ? -threshold : std::min(std::max(threshold, 0.1), std::fabs(1 - threshold));
  double width = reach / 100000, lowest = threshold - width;
  return {threshold > 0 ? std::max(0.0, lowest) : lowest, threshold + width};
}

// What exits have said so far about one sample becomes one answer and one score: combined exits.
class Combination {
 public:
  Combination() = default;
  Combination(const Json& content, size_t exits) : kind_(content["kind"].text()) {
    if (kind_ == "Vote") {
      inputs = {content["column"].text()};
      constants_ = rows(content["constants"]), slopes_ = rows(content["slopes"]), others_ = content["others"].numbers();
      bool sized = constants_.size() == exits && slopes_.size() == exits && others_.size() == exits;
      for (size_t each = 0; sized && each < exits; ++each)
        sized = constants_[each].size() == each + 1 && slopes_[each].size() == each + 1;
      for (const auto* votes : {&constants_, &slopes_})
        for (const std::vector<double>& row : *votes)
          for (double each : row) sized = sized && each >= 0;
      if (!sized) fail();
    } else if (kind_ == "Gain") {
      for (const Json& each : content["columns"].items) inputs.push_back(each.text());
      weights_ = rows(content["weights"]), gains_ = rows(content["class_gains"]);
      for (const Json& each : content["knots"].items) knots_.push_back(rows(each));
      if (knots_.size() != exits || weights_.size() != exits || gains_.size() != exits || inputs.empty()) fail();
      for (size_t exit = 0; exit < exits; ++exit) {
        size_t expected = exit ? 5 : 1;
        for (const std::vector<double>& bends : knots_[exit]) expected += exit ? 4 + 2 * bends.size() : 1 + bends.size();
        if (knots_[exit].size() != inputs.size() || weights_[exit].size() != expected) fail();
      }
    } else {
      throw Error("the policy combines exits as a " + kind_ + ", which does not run in C++: calibrate by `eero`, or with"
                  " another --combine, or run the folder in Python");
    }
  }

  // Answer and score at an open exit; `said` holds answer and scores of every exit before, and of this one then.
  std::pair<int64_t, double> operator()(size_t exit, int64_t prediction, const std::vector<double>& read,
                                        std::vector<std::vector<double>>& said) const {
    std::pair<int64_t, double> found = kind_ == "Vote" ? vote(exit, prediction, read[0], said)
                                                       : std::make_pair(prediction, -gain(exit, prediction, read, said));
    said.push_back({static_cast<double>(prediction)});
    said.back().insert(said.back().end(), read.begin(), read.end());
    return found;
  }

  bool keeps_answers() const { return kind_ == "Gain"; }  // else an answer has no single probability
  std::vector<std::string> inputs;                        // scores that it reads at every exit

 private:
  using Said = std::vector<std::vector<double>>;
  [[noreturn]] static void fail() { throw Error("the numbers of the combination do not fit together: calibrate again"); }
  static std::vector<std::vector<double>> rows(const Json& content) {
    std::vector<std::vector<double>> made;
    for (const Json& each : content.items) made.push_back(each.numbers());
    return made;
  }
  // The class with the most votes of the exits so far, of equals that of the latest exit, and its lead.
  std::pair<int64_t, double> vote(size_t exit, int64_t prediction, double score, const Said& said) const {
    std::vector<double> classes{static_cast<double>(prediction)}, scores{score}, votes(exit + 1, 0);  // the latest first
    for (size_t each = exit; each-- > 0;) classes.push_back(said[each][0]), scores.push_back(said[each][1]);
    for (size_t place = 0; place <= exit; ++place)
      for (size_t voter = 0; voter <= exit; ++voter)
        if (classes[place] == classes[voter])
          votes[place] += constants_[exit][exit - voter] + slopes_[exit][exit - voter] * scores[voter];
    size_t best = static_cast<size_t>(std::max_element(votes.begin(), votes.end()) - votes.begin());
    double rival = others_[exit];
    for (size_t place = 0; place <= exit; ++place)
      if (classes[place] != classes[best]) rival = std::max(rival, votes[place]);
    return {static_cast<int64_t>(classes[best]), votes[best] - rival};
  }
  // What going on is expected to bring: a function of all outputs so far, bent at knots.
  double gain(size_t exit, int64_t prediction, const std::vector<double>& read, const Said& said) const {
    std::vector<double> clues;
    double before = static_cast<double>(said.size());
    for (size_t column = 0; column < read.size(); ++column) {
      double now = read[column], best = now, sum = 0;
      for (const std::vector<double>& each : said) best = std::max(best, each[column + 1]), sum += each[column + 1];
      clues.push_back(now);
      if (exit) clues.insert(clues.end(), {said.back()[column + 1], best, sum * (1.0 / before)});
      for (double value : exit ? std::vector<double>{now, best} : std::vector<double>{now})
        for (double bend : knots_[exit][column]) clues.push_back(value > bend ? value - bend : 0.0);
    }
    if (exit) {
      double agreeing = 0, surest = 0, same = 0;
      for (size_t each = 0; each < said.size(); ++each) {
        same = said[each][0] == static_cast<double>(prediction) ? 1.0 : 0.0;
        agreeing += same;
        surest = each ? std::max(surest, same * said[each][1]) : same * said[each][1];
      }
      agreeing *= 1.0 / before;
      clues.insert(clues.end(), {same, agreeing, agreeing * read[0], surest});
    }
    double sum = weights_[exit][0];
    for (size_t each = 0; each < clues.size(); ++each) sum += weights_[exit][each + 1] * clues[each];
    size_t class_index = static_cast<size_t>(prediction);
    return class_index < gains_[exit].size() ? sum + gains_[exit][class_index] : sum;
  }
  std::string kind_;
  std::vector<std::vector<double>> constants_, slopes_, weights_, gains_;
  std::vector<std::vector<std::vector<double>>> knots_;
  std::vector<double> others_;
};

struct Memory {  // what a policy remembers of a sample between exits
  int64_t previous = -1, count = -1;
  std::vector<Memory> parts;
  std::vector<std::vector<double>> said;  // answers and scores of earlier exits, where they are combined
};

class Policy {
 public:
  explicit Policy(const Json& content) : Policy(content, content["salt"].integer()) {
    for (const std::string& each : inputs())
      if ((costs.size() > 1 || combination) && std::find(SCORES.begin(), SCORES.end(), each) == SCORES.end())
        throw Error("the policy reads the score " + each + ", which is not known here: run the folder in Python");
  }

  // Scores that are read at every exit.
  std::vector<std::string> inputs() const { return combination ? combination->inputs : std::vector{score}; }

  // Whether a sample leaves at an open exit before the last.
  bool leaves(size_t exit, int64_t sample, int64_t prediction, double score_value, Memory& memory) const {
    if (rule == "Threshold") {
      if (score_value > ties[exit].highest) return true;
      return score_value >= ties[exit].lowest && hashed_below(sample, tie_shares[exit], salt, TIES);
    }
    if (rule == "Patience") {
      memory.count = prediction == memory.previous || memory.count < 0 ? memory.count + 1 : 0;
      memory.previous = prediction;
      return memory.count >= patience;
    }
    if (rule == "Streak") {
      memory.count = score_value >= lowest ? std::max<int64_t>(memory.count, 0) + 1 : 0;
      return memory.count >= patience;
    }
    if (rule == "Lottery") {
      double waiting = std::accumulate(exit_rates.begin() + static_cast<long>(exit), exit_rates.end(), 0.0);
      double now = waiting > 0 ? std::min(1.0, exit_rates[exit] / waiting) : 1.0;
      return hashed_below(sample, now, salt, LOTTERY + exit);
    }
    if (rule == "ExitAt") return true;
    memory.parts.resize(2);  // of a mixture
    bool first = parts[0].leaves(exit, sample, prediction, score_value, memory.parts[0]);
    bool second = parts[1].leaves(exit, sample, prediction, score_value, memory.parts[1]);
    return hashed_below(sample, share, salt, MIXING) ? first : second;
  }

  std::string rule, score, fingerprint;
  std::optional<Combination> combination;
  std::vector<double> costs;
  std::vector<int64_t> open_exits;
  int64_t num_exits = 0;  // of the network, open or closed

 private:
  static constexpr uint64_t TIES = 0, MIXING = 1, LOTTERY = 100;  // purposes of random draws
  Policy(const Json& content, int64_t seed)
      : rule(content["rule"].text()), score(content["score"].text()), fingerprint(content["fingerprint"].text()),
        costs(content["costs"].numbers()), open_exits(content["open_exits"].numbers<int64_t>()),
        num_exits(content["num_exits"].integer()), salt(static_cast<uint64_t>(seed)) {
    if (!content["combination"].is_null()) combination.emplace(content["combination"], open_exits.size());
    if (rule == "Threshold") thresholds = content["thresholds"].numbers(), tie_shares = content["tie_shares"].numbers();
    else if (rule == "Patience") patience = content["patience"].integer();
    else if (rule == "Streak") threshold = content["threshold"].number(), lowest = tie_range(threshold).lowest,
                                  patience = content["patience"].integer();
    else if (rule == "Lottery") exit_rates = content["exit_rates"].numbers();
    else if (rule == "Mixture") {
      share = content["share"].number();
      parts = {Policy(content["first"], seed), Policy(content["second"], seed)};
      for (const Policy& each : parts)
        if (each.combination || each.costs != costs || each.open_exits != open_exits || each.score != score) fail();
    } else if (rule != "ExitAt") throw Error("a policy " + rule + " needs batches or streams: run the folder in Python");
    size_t asked = costs.size() - 1;  // exits at which it decides
    bool sized = !costs.empty() && open_exits.size() == costs.size() && (rule != "ExitAt" || !asked);
    if (rule == "Threshold") sized = sized && thresholds.size() == asked && tie_shares.size() == asked;
    if (rule == "Lottery")
      sized = sized && exit_rates.size() == costs.size() &&
              std::abs(std::accumulate(exit_rates.begin(), exit_rates.end(), -1.0)) <= 1e-6;
    for (size_t each = 0; each < costs.size(); ++each)
      sized = sized && std::isfinite(costs[each]) && costs[each] > (each ? costs[each - 1] : 0);
    for (const std::vector<double>* shares : {&tie_shares, &exit_rates})
      for (double each : *shares) sized = sized && each >= 0 && each <= 1;
    for (double each : thresholds) sized = sized && !std::isnan(each);
    for (double each : thresholds) ties.push_back(tie_range(each));
    if (!sized || std::isnan(threshold) || patience < 0 || !(share >= 0 && share <= 1) || seed < 0) fail();
  }
  [[noreturn]] static void fail() { throw Error("the numbers of the policy do not fit together: calibrate again"); }
  std::vector<double> thresholds, tie_shares, exit_rates;
  std::vector<Ties> ties;
  double threshold = 0, lowest = 0, share = 0;
  int64_t patience = 0;
  uint64_t salt = 0;
  std::vector<Policy> parts;
};

// ---------------------------------------------------------------------------------------------- the walk

struct Input {  // a batch of one tensor, as the network takes it
  const void* data;
  std::vector<int64_t> shape;
};

struct Decision {
  int64_t prediction = 0, exit = 0;  // of all exits of the network, open or closed
  double cost = 0, probability = 0;  // NaN of an answer that several exits give together
};

class Predictor {
 public:
  explicit Predictor(const std::string& folder, int threads = 1, const std::string& library = "libonnxruntime.so")
      : Predictor(folder, read_kind(manifest_content(folder), "Deployment"), threads, library) {}

  // Decisions about a batch, one Input for each of `inputs`; its samples have the numbers first, first + 1, ...
  std::vector<Decision> operator()(const std::vector<Input>& given, int64_t first) const {
    State state = admitted(given, first);
    const std::vector<std::string> scores = policy.inputs();
    size_t count = static_cast<size_t>(given[0].shape[0]);
    std::vector<Decision> decisions(count);
    std::vector<Memory> memories(count);
    std::vector<size_t> waiting(count), staying;
    std::iota(waiting.begin(), waiting.end(), size_t{0});
    for (size_t stage = 0; stage < stages_.size() && !waiting.empty(); ++stage) {
      State made = (*stages_[stage])(state);
      const Tensor& logits = made[0];
      size_t width = static_cast<size_t>(logits.shape()[1]);
      staying.clear();
      for (size_t row = 0; row < waiting.size(); ++row) {
        size_t index = waiting[row];
        int64_t sample = first + static_cast<int64_t>(index);
        HeadValues values = head_values(logits.data<float>() + row * width, width, scores);
        if (!std::isfinite(values.largest))
          throw Error("the network gives unusable logits for sample " + std::to_string(sample) + ": look for overflow");
        double score = values.scores[0];
        if (policy.combination) {
          std::tie(values.prediction, score) =
              (*policy.combination)(stage, values.prediction, values.scores, memories[index].said);
          if (!policy.combination->keeps_answers()) values.probability = std::numeric_limits<double>::quiet_NaN();
        }
        bool last = stage + 1 == stages_.size();
        if (last || policy.leaves(stage, sample, values.prediction, score, memories[index]))
          decisions[index] = {values.prediction, policy.open_exits[stage], policy.costs[stage], values.probability};
        else
          staying.push_back(row);
      }
      if (staying.empty()) break;
      bool everybody = staying.size() == waiting.size();
      state.clear();
      for (size_t each = 1; each < made.size(); ++each)
        state.push_back(everybody ? std::move(made[each]) : made[each].taken(staying, carried_[stage][each - 1].dtype));
      for (size_t& row : staying) row = waiting[row];
      waiting.swap(staying);
    }
    return decisions;
  }
  std::vector<Decision> operator()(const std::vector<float>& images, int64_t first) const {
    size_t one = 1;
    auto any = std::count(inputs[0].shape.begin(), inputs[0].shape.end(), -1);  // sizes, that of the batch among them
    if (inputs.size() != 1 || inputs[0].dtype != "float32" || any > 1)
      throw Error("the network takes other inputs than floats of one size: give them with their shapes");
    for (size_t axis = 1; axis < inputs[0].shape.size(); ++axis) one *= static_cast<size_t>(inputs[0].shape[axis]);
    std::vector<int64_t> shape = inputs[0].shape;
    if (images.empty() || images.size() % one)
      throw Error(std::to_string(images.size()) + " numbers are not images of " + std::to_string(one) + " each");
    shape[0] = static_cast<int64_t>(images.size() / one);
    return (*this)({{images.data(), shape}}, first);
  }

  // Images of bytes as the network takes them; their channels may come last, first or, of grey images, not at all.
  std::vector<float> normalised(const uint8_t* pixels, const std::vector<int64_t>& shape) const {
    if (mean_.empty() || inputs[0].shape.size() != 4)
      throw Error("how the network normalises images is unknown: export it with a normalisation");
    bool last = channels_last(shape);
    size_t count = static_cast<size_t>(shape[0]), channels = mean_.size();
    size_t area = count_of(shape) / (count * channels);
    std::vector<float> made(count * channels * area);
    for (size_t image = 0; image < count; ++image)
      for (size_t place = 0; place < area; ++place)
        for (size_t channel = 0; channel < channels; ++channel) {
          size_t to = (image * channels + channel) * area + place;
          size_t from = last ? (image * area + place) * channels + channel : to;
          made[to] = (static_cast<float>(pixels[from]) / 255.0f - mean_[channel]) / std_[channel];
        }
    return made;
  }

  // A warning if images are floats that look like pixels in 0..1 or 0..255, which the network would have normalised.
  std::string warning_of_pixels(const float* images, size_t count) const {
    constexpr float FAR = 4;  // times the number for white that no normalised image reaches
    if (mean_.empty() || inputs.size() != 1 || inputs[0].shape.size() != 4 || !count) return "";
    auto [low, high] = std::minmax_element(images, images + count);
    float black = 0, white = -std::numeric_limits<float>::infinity();
    std::string means, stds;
    for (size_t channel = 0; channel < mean_.size(); ++channel) {
      black = std::min(black, (0 - mean_[channel]) / std_[channel]);
      white = std::max(white, (1 - mean_[channel]) / std_[channel]);
      means += (channel ? ", " : "") + short_text(mean_[channel]);
      stds += (channel ? ", " : "") + short_text(std_[channel]);
    }
    bool zero_to_one = *low < *high && *high <= 1 && black < 0;
    if (!(*low >= 0 && (zero_to_one || *high > FAR * white))) return "";
    return "images are floats from " + short_text(*low) + " to " + short_text(*high) + ", which are taken as what the" +
           " network takes, and it normalises pixels by mean (" + means + ") and std (" + stds + "): give bytes (uint8) or" +
           " normalised floats; if it takes pixels in 0..1, export it with --mean 0 --std 1";
  }

  // Whether pixels have their channels last, where the network takes them first. Any other shape is refused.
  bool channels_last(const std::vector<int64_t>& pixels) const {
    bool grey = pixels.size() == 3 && inputs[0].fits({pixels[0], 1, pixels[1], pixels[2]});
    if (inputs[0].fits(pixels) || grey) return false;
    if (!inputs[0].fits_channels_last(pixels)) inputs[0].refuse(pixels);
    return true;
  }

  std::vector<Spec> inputs;  // what the first stage takes
  std::vector<std::string> exits, classes;
  Policy policy;

 private:
  Predictor(const std::string& folder, const Json& manifest, int threads, const std::string& library)
      : policy(read_kind(verified(folder, "policy.json", manifest["policy_checksum"].text()), "Policy")),
        runtime_(std::make_shared<Runtime>(library)) {
    std::string own = manifest["runtime"].text();
    bool other = own != "onnxruntime" || !manifest["providers"].items.empty();  // that rounds otherwise
    if (manifest["format"].text() != "onnx" || (other && manifest["precision"].text() != "float32"))
      throw Error(folder + " was exported for " + own + " or its providers: export it as onnx for onnxruntime");
    if (!policy.fingerprint.empty() && policy.fingerprint != manifest["fingerprint"].text())
      throw Error("the policy in " + folder + " was calibrated on another network: calibrate again");
    for (const Json& each : manifest["inputs"].items) inputs.emplace_back(each);
    for (const Json& each : manifest["exits"].items) exits.push_back(each.text());
    for (const Json& each : manifest["classes"].items) classes.push_back(each.text());
    if (!manifest["normalisation"].is_null()) {
      mean_ = manifest["normalisation"]["mean"].numbers<float>();
      std_ = manifest["normalisation"]["std"].numbers<float>();
    }
    bool images = !inputs.empty() && inputs[0].shape.size() == 4 && inputs[0].shape[1] > 0;
    size_t channels = images ? static_cast<size_t>(inputs[0].shape[1]) : 0;
    if (mean_.size() == 1 && std_.size() == 1 && channels) {  // the same for all channels
      mean_.resize(channels, mean_[0]);
      std_.resize(channels, std_[0]);
    }
    if (!manifest["lengths"].is_null()) lengths_ = manifest["lengths"].numbers<int64_t>();
    bool whole = !inputs.empty() && mean_.size() == std_.size() && (lengths_.empty() || lengths_.size() == 2) &&
                 (mean_.empty() || !channels || mean_.size() == channels);
    for (float each : mean_) whole = whole && std::isfinite(each);
    for (float each : std_) whole = whole && std::isfinite(each) && each > 0;
    std::vector<int64_t> opened;
    for (const Json& stage : manifest["stages"].items) {
      const std::string& file = stage["file"].text();
      std::string content = verified(folder, file, stage["checksum"].text());
      check_whole(content, file);
      stages_.push_back(std::make_unique<Session>(runtime_, content, folder + "/" + file, threads));
      std::vector<Spec> carried;
      for (const Json& each : stage["carries"].items) carried.emplace_back(each);
      carried_.push_back(std::move(carried));
      opened.push_back(stage["exit"].integer());
    }
    if (policy.num_exits != static_cast<int64_t>(exits.size()))
      throw Error("the policy in " + folder + " is for a network with another number of exits: calibrate again");
    if (opened != policy.open_exits) throw Error("the policy in " + folder + " opens other exits than its stages");
    for (int64_t each : opened) whole = whole && each >= 0 && each < static_cast<int64_t>(exits.size());
    for (size_t stage = 0; stage < stages_.size(); ++stage) {
      const std::vector<Spec>& given = stage ? carried_[stage - 1] : inputs;
      whole = whole && !given.empty() && stages_[stage]->takes() == given.size();
      whole = whole && stages_[stage]->gives().size() == carried_[stage].size() + 1;
    }
    if (!whole) throw Error("the parts of " + folder + "/manifest.json do not fit together: export the network again");
    for (size_t stage = 0; stage < stages_.size(); ++stage)
      check_types(manifest["stages"].items[stage]["file"].text(), stages_[stage]->gives(), carried_[stage]);
    probe(folder, manifest);
  }

  // Refuses a stage whose numbers would be read as those of another type.
  static void check_types(const std::string& file, const std::vector<int>& given, const std::vector<Spec>& carried) {
    auto name = [](int code) {
      size_t place = static_cast<size_t>(code);
      return place < ELEMENT_TYPES.size() ? ELEMENT_TYPES[place].name : "type " + std::to_string(code) + " of ONNX";
    };
    if (given[0] != code_of("float32"))
      throw Error(file + " gives logits of " + name(given[0]) + ", and float32 is read here: let the network end in" +
                  " .float() and export it again, or run the folder in Python");
    for (size_t each = 0; each < carried.size(); ++each)
      if (given[each + 1] != code_of(carried[each].dtype))
        throw Error(file + " gives " + carried[each].name + " of " + name(given[each + 1]) + ", and the manifest says " +
                    carried[each].dtype + ": export the network again");
  }

  static std::string short_text(float number) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%g", static_cast<double>(number));
    return text.data();
  }

  // The place of the first number that is NaN, infinite or a negative token; `count` if none is.
  template <class T>
  static size_t first_unusable(const void* numbers, size_t count) {
    const T* first = static_cast<const T*>(numbers);
    auto unusable = [](T each) { return std::is_integral_v<T> ? each < 0 : !std::isfinite(static_cast<double>(each)); };
    return static_cast<size_t>(std::find_if(first, first + count, unusable) - first);
  }

  State admitted(const std::vector<Input>& given, int64_t first) const {
    if (given.size() != inputs.size())
      throw Error(std::to_string(given.size()) + " inputs, and the network takes " + std::to_string(inputs.size()));
    State state;
    size_t text = inputs.size();  // the first input whose length may differ
    for (size_t index = 0; index < given.size(); ++index) {
      const Spec& spec = inputs[index];
      const std::vector<int64_t>& shape = given[index].shape;
      if (!spec.fits(shape)) spec.refuse(shape);
      if (shape[0] != given[0].shape[0])
        throw Error(std::to_string(given[0].shape[0]) + " samples of " + inputs[0].name + " and " +
                    std::to_string(shape[0]) + " of " + spec.name + ": give as many of each");
      if (!lengths_.empty() && shape.size() > 1 && spec.shape[1] < 0) {
        text = std::min(text, index);
        if (int64_t length = given[text].shape[1]; shape[1] != length)
          throw Error(inputs[text].name + " has " + std::to_string(length) + " tokens and " + spec.name + " " +
                      std::to_string(shape[1]) + ": give every input of a text one length");
        if (shape[1] < lengths_[0] || shape[1] > lengths_[1])
          throw Error("texts of " + std::to_string(shape[1]) + " tokens, and the network was compared for " +
                      std::to_string(lengths_[0]) + " to " + std::to_string(lengths_[1]) + ": give such texts");
      }
      const void* data = given[index].data;
      size_t count = count_of(shape);
      size_t place = spec.dtype == "float32"   ? first_unusable<float>(data, count)
                     : spec.dtype == "float64" ? first_unusable<double>(data, count)
                     : spec.dtype == "int64"   ? first_unusable<int64_t>(data, count)
                     : spec.dtype == "int32"   ? first_unusable<int32_t>(data, count)
                     : spec.dtype == "int8"    ? first_unusable<int8_t>(data, count)
                                               : count;
      if (place < count) {
        int64_t row = static_cast<int64_t>(place / (count / static_cast<size_t>(shape[0])));
        throw Error("the input of sample " + std::to_string(first + row) + " holds NaN, infinity or a negative token:" +
                    " look for it there, since a network may answer it all the same");
      }
      state.emplace_back(*runtime_, spec.dtype, shape, data);
    }
    return state;
  }

  // One sample that is made as `probe_inputs` of Python makes it: floats from -2 to 2, tokens 0 and 1, nothing masked.
  static std::vector<char> probe_values(const Spec& spec, size_t numbers) {
    const double golden = (std::sqrt(5.0) - 1) / 2;
    const std::string& name = spec.name;
    constexpr size_t ENDING = 12;  // letters of "padding_mask"
    bool padding = name.size() >= ENDING && name.compare(name.size() - ENDING, ENDING, "padding_mask") == 0;
    size_t bytes = bytes_of(spec.dtype);
    std::vector<char> made(numbers * bytes);
    for (size_t each = 0; each < numbers; ++each) {
      double wide = 4 * std::fmod(golden * static_cast<double>(each), 1.0) - 2;
      float single = static_cast<float>(wide);
      int64_t whole = name == "attention_mask" ? 1 : padding ? 0 : each % 2;  // its first bytes are the smaller types
      const void* from = spec.dtype == "float32" ? static_cast<const void*>(&single) : &whole;
      std::memcpy(&made[each * bytes], spec.dtype == "float64" ? &wide : from, bytes);
    }
    return made;
  }

  // Checks that the stages compute here what they did where they were exported.
  void probe(const std::string& folder, const Json& manifest) const {
    constexpr int64_t TOKENS = 7;  // and every other size that may differ
    const std::vector<Json>& stages = manifest["stages"].items;
    if (stages.back()["probe"].items.empty()) return;
    State state;
    std::vector<std::vector<char>> values;
    for (const Spec& spec : inputs) {
      std::vector<int64_t> shape = spec.shape;
      std::replace(shape.begin(), shape.end(), int64_t{-1}, TOKENS);
      shape[0] = 1;
      values.push_back(probe_values(spec, count_of(shape)));
      state.emplace_back(*runtime_, spec.dtype, shape, values.back().data());
    }
    double allowed = manifest["precision"].text() == "int8" ? 0.05 : 1e-3;
    for (size_t stage = 0; stage < stages_.size(); ++stage) {
      State made = (*stages_[stage])(state);
      std::vector<double> wanted = stages[stage]["probe"].numbers();
      if (static_cast<int64_t>(wanted.size()) > made[0].shape().back())
        throw Error("the parts of " + folder + "/manifest.json do not fit together: export the network again");
      double largest = 1e-2, gap = 0;
      for (double each : wanted) largest = std::abs(each) < 1e9 ? std::max(largest, std::abs(each)) : largest;
      for (size_t each = 0; each < wanted.size(); ++each) {  // masked logits are compared with themselves alone
        double difference = std::abs(wanted[each] - static_cast<double>(made[0].data<float>()[each]));
        double part = difference / std::max(largest, std::abs(wanted[each]));
        gap = gap >= part || std::isnan(gap) ? gap : part;  // NaN stays
      }
      if (!(gap <= allowed)) {
        std::array<char, 64> text{};
        std::snprintf(text.data(), text.size(), "(by %.2g of the largest, %g allowed)", gap, allowed);
        throw Error(folder + "/" + stages[stage]["file"].text() + " gives other logits here than where it was exported " +
                    text.data() + ": export the network on such a machine");
      }
      made.erase(made.begin());
      state = std::move(made);
    }
  }

  std::shared_ptr<const Runtime> runtime_;
  std::vector<std::unique_ptr<Session>> stages_;
  std::vector<std::vector<Spec>> carried_;
  std::vector<float> mean_, std_;
  std::vector<int64_t> lengths_;  // of texts for which the files were compared with the network
};

}  // namespace alight
