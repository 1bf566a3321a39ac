// Decides about images and prints a line for each: sample, class, exit, cost, probability. Classes have their names
// where the folder knows them; --indices prints their indices, from 0, all the same.
//
//     alight_example FOLDER images.npy [--batch N] [--threads N] [--library FILE] [--warm N] [--times] [--indices]
//
// images.npy holds bytes, channels last or first, or numbers as the network takes them. Times of the batches
// go to the error output: mean, median and 99th percentile, or with --times each of them in milliseconds. At least
// --warm images are decided before, in batches as the timed ones and again from the first where there are fewer: the
// first batches of a program are slower. Without the option it is 10 batches.
#include <chrono>
#include <cstdio>
#include <iostream>
#include <sstream>

#include "alight.hpp"

constexpr size_t WARM_BATCHES = 10;

struct Images {
  std::vector<int64_t> shape;
  std::string dtype;
  size_t bytes = 0;           // of one number
  std::vector<char> content;  // of the array
};

// An array that NumPy saved, rows first.
Images read_npy(const std::string& path) {
  std::string file = alight::file_content(path, "check its path");
  if (file.size() < 12 || file.compare(0, 6, "\x93NUMPY") || file[6] < 1 || file[6] > 3)
    throw alight::Error(path + " is not an .npy file: save the array by numpy.save");
  bool old = file[6] == 1;
  size_t start = old ? 10 : 12, length = 0;
  for (size_t each = start; each-- > 8;) length = length << 8 | static_cast<uint8_t>(file[each]);
  const alight::Error cut(path + " is cut short: write it again");
  if (file.size() < start + length) throw cut;
  const std::string header = file.substr(start, length), key = "'descr': ";
  const std::map<std::string, std::string> dtypes{
      {"|u1", "uint8"}, {"<u2", "uint16"}, {"<u4", "uint32"}, {"<u8", "uint64"}, {"|i1", "int8"}, {"<i2", "int16"},
      {"<i4", "int32"}, {"<i8", "int64"}, {"<f4", "float32"}, {"<f8", "float64"}, {"|b1", "bool"}};
  Images images;
  for (const auto& [written, dtype] : dtypes)
    if (header.find(key + "'" + written + "'") != std::string::npos)
      images.dtype = dtype, images.bytes = static_cast<size_t>(written[2] - '0');
  size_t type = header.find(key), opening = header.find('('), closing = header.find(')', opening);
  if (type == std::string::npos || closing == std::string::npos) throw cut;
  type += key.size();
  if (images.dtype.empty())
    throw alight::Error(path + " holds " + header.substr(type, header.find(", '", type) - type) +
                        ", which is not read here: save uint8, or numbers as the network takes them, little-endian");
  if (header.find("'fortran_order': False") == std::string::npos)
    throw alight::Error(path + " is in Fortran order: save numpy.ascontiguousarray of it");
  constexpr double LARGEST = 9007199254740992;       // whole number up to which doubles hold all
  auto bytes = static_cast<double>(images.bytes);  // of the array: no shape overflows a double
  std::istringstream sizes(header.substr(opening + 1, closing - opening - 1));
  for (double size = 0; sizes >> size; sizes.ignore(static_cast<std::streamsize>(length), ',')) {
    if (!(size >= 0 && size <= LARGEST)) throw cut;
    images.shape.push_back(static_cast<int64_t>(size));
    bytes *= size;
  }
  if (images.shape.empty() || !images.shape[0]) throw alight::Error(path + " holds no images: give at least one");
  if (bytes > static_cast<double>(file.size() - start - length)) throw cut;
  auto first = file.begin() + static_cast<long>(start + length);
  images.content.assign(first, first + static_cast<long>(bytes));
  return images;
}

// Brings bytes with their channels last to the order in which a network that takes bytes reads them, channels first.
void put_channels_first(Images& images) {
  const std::vector<int64_t> shape = images.shape;
  size_t area = static_cast<size_t>(shape[1] * shape[2]), channels = static_cast<size_t>(shape[3]);
  const std::vector<char> given = images.content;
  for (size_t each = 0; each < given.size(); ++each) {
    size_t channel = each % channels, place = each / channels % area, image = each / channels / area;
    images.content[(image * channels + channel) * area + place] = given[each];
  }
  images.shape = {shape[0], shape[3], shape[1], shape[2]};
}

// Brings whole numbers to int64 or int32, which a network takes, if all of them fit.
void convert(Images& images, const std::string& dtype, const std::string& misfit) {
  const bool has_sign = images.dtype[0] == 'i';
  const size_t from = images.bytes, to = alight::bytes_of(dtype);
  const size_t count = images.content.size() / from, unused = 64 - 8 * from;
  std::vector<char> made(count * to);
  for (size_t each = 0; each < count; ++each) {
    uint64_t bits = 0;
    std::memcpy(&bits, &images.content[each * from], from);
    int64_t value = has_sign ? static_cast<int64_t>(bits << unused) >> unused : static_cast<int64_t>(bits);
    if ((!has_sign && value < 0) || (to == 4 && value != static_cast<int32_t>(value)))
      throw alight::Error(misfit + ", which does not hold " + (has_sign ? std::to_string(value) : std::to_string(bits)) +
                          ": give numbers in its range");
    std::memcpy(&made[each * to], &value, to);  // its first bytes are the smaller type
  }
  images.content = std::move(made);
  images.dtype = dtype;
  images.bytes = to;
}

// A text as a cell of a CSV file, quoted as Python does.
std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string made = "\"";
  for (char each : text) made += each == '"' ? "\"\"" : std::string(1, each);
  return made + '"';
}

// The whole number that follows an option.
int number_of(const std::map<std::string, std::string>& options, const std::string& name, int least) {
  const std::string& text = options.at(name);
  int number = 0;
  auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size() || number < least)
    throw alight::Error(name + " " + text + ": give a whole number, " + std::to_string(least) + " or more");
  return number;
}

int main(int count, char** given) try {
  std::vector<std::string> places;
  std::map<std::string, std::string> options{
      {"--batch", "1"}, {"--threads", "1"}, {"--library", "libonnxruntime.so"}, {"--warm", ""}};
  bool each_time = false, indices = false;
  for (int each = 1; each < count; ++each) {
    std::string text = given[each];
    if (options.count(text) && each + 1 < count) options[text] = given[++each];
    else if (text == "--times") each_time = true;
    else if (text == "--indices") indices = true;
    else places.push_back(text);
  }
  if (places.size() != 2)
    throw alight::Error("usage: alight_example FOLDER images.npy [--batch N] [--threads N] [--library FILE] [--warm N]"
                        " [--times] [--indices]\n--warm N: decide about N images before the timed ones (10 batches by default)\n"
                        "--indices: print the indices of classes instead of their names");
  const int threads = number_of(options, "--threads", 1);
  size_t batch = static_cast<size_t>(number_of(options, "--batch", 1));
  size_t warm = options["--warm"].empty() ? 0 : static_cast<size_t>(number_of(options, "--warm", 0));
  auto begin = std::chrono::steady_clock::now();
  alight::Predictor predictor(places[0], threads, options["--library"]);
  auto milliseconds = [](auto from) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - from).count();
  };
  double loading = milliseconds(begin);
  Images images = read_npy(places[1]);
  const alight::Spec& own = predictor.inputs[0];
  bool pixels = images.dtype == "uint8" && own.dtype == "float32";  // which are normalised
  const std::string misfit = places[1] + " holds " + images.dtype + ", and the network takes " + own.dtype;
  bool whole = images.dtype.find("int") != std::string::npos && (own.dtype == "int64" || own.dtype == "int32");
  if (whole && images.dtype != own.dtype) convert(images, own.dtype, misfit);
  if (!pixels && images.dtype != own.dtype) throw alight::Error(misfit + ": give that");
  size_t total = static_cast<size_t>(images.shape[0]), row = images.content.size() / total;  // bytes of an image
  batch = std::min(total, batch);
  if (options["--warm"].empty()) warm = WARM_BATCHES * batch;
  bool last = images.dtype == "uint8" && predictor.channels_last(images.shape);
  if (last && !pixels) put_channels_first(images);
  bool grey = images.dtype == "uint8" && !pixels && !last && !own.fits(images.shape);  // bytes without channels
  if (grey) images.shape.insert(images.shape.begin() + 1, 1);
  if (!pixels && !own.fits(images.shape)) own.refuse(images.shape);
  if (own.dtype == "float32" && !pixels) {
    const auto* numbers = reinterpret_cast<const float*>(images.content.data());
    std::string warning = predictor.warning_of_pixels(numbers, images.content.size() / sizeof(float));
    if (!warning.empty()) std::cerr << "alight: " << warning << '\n';
  }
  std::vector<double> times;
  std::vector<alight::Decision> decisions(total);
  auto decide = [&](size_t start) {  // about a batch; returns the number of its images
    size_t size = std::min(batch, total - start);
    const char* data = images.content.data() + start * row;
    std::vector<int64_t> shape = images.shape;
    shape[0] = static_cast<int64_t>(size);
    std::vector<float> values;
    if (pixels) values = predictor.normalised(reinterpret_cast<const uint8_t*>(data), shape);
    auto from = std::chrono::steady_clock::now();
    auto number = static_cast<int64_t>(start);
    std::vector<alight::Decision> found = pixels ? predictor(values, number) : predictor({{data, shape}}, number);
    times.push_back(milliseconds(from));
    std::copy(found.begin(), found.end(), decisions.begin() + static_cast<long>(start));
    return size;
  };
  size_t warmed = 0;
  for (size_t start = 0; warmed < warm; start = start < total ? start : 0) {
    size_t size = decide(start);
    warmed += size, start += size;
  }
  times.clear();
  for (size_t start = 0; start < total;) start += decide(start);
  const auto known = static_cast<int64_t>(predictor.classes.size());
  for (const alight::Decision& each : decisions) indices = indices || each.prediction >= known;
  std::puts("sample,prediction,exit,cost,probability");
  for (size_t sample = 0; sample < total; ++sample) {
    const alight::Decision& each = decisions[sample];
    auto place = static_cast<size_t>(each.prediction);
    std::string label = indices ? std::to_string(place) : csv_cell(predictor.classes[place]);
    std::string exit = csv_cell(predictor.exits[static_cast<size_t>(each.exit)]);
    std::printf("%zu,%s,%s,%.17g,", sample, label.c_str(), exit.c_str(), each.cost);
    std::isnan(each.probability) ? std::puts("") : std::printf("%.17g\n", each.probability);
  }
  if (each_time) {
    for (double each : times) std::fprintf(stderr, "%.6f\n", each);
    return 0;
  }
  double mean = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
  std::sort(times.begin(), times.end());
  auto quantile = [&](double share) {
    return times[static_cast<size_t>(std::ceil(share * static_cast<double>(times.size()))) - 1];
  };
  std::fprintf(stderr, "loaded in %.1f ms, warmed up by %zu images; batches of %zu: mean %.3f ms, median %.3f ms, 99th"
               " percentile %.3f ms\n", loading, warmed, batch, mean, quantile(0.5), quantile(0.99));
} catch (const std::exception& error) {
  std::cerr << "alight: " << error.what() << '\n';
  return 1;
}
