// What gradzip._C.cuda has besides kernels in a build without nvcc; gradzip/ops/nvrtc compiles them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "nvrtc/driver.h"
#include "nvrtc/sources.h"

namespace gradzip::driver {

namespace py = pybind11;

inline py::dict sources_by_path() {
  py::dict found;
  for (const Source* source = sources; source->path; ++source) found[source->path] = source->text;
  return found;
}

inline void bind(py::module_& m) {
  // The sources of the kernels, by the path that others include.
  m.def("sources", sources_by_path);
  // (module, name, sizes of the parameters, unit) of each kernel that launchers ask for.
  m.def("kernels", [] {
    py::list found;
    for (const auto& entry : entries())
      found.append(py::make_tuple(entry->module, entry->name, entry->sizes, entry->unit));
    return found;
  });
  set_compiler([](const std::string& module, const std::vector<std::string>& names, int capability, int driver) {
    const py::gil_scoped_acquire gil;
    const auto compile = py::module_::import("gradzip.ops.nvrtc").attr("compile_module");
    auto [image, symbols] = compile(sources_by_path(), module, names, capability, driver)
                                .cast<std::pair<std::string, std::map<std::string, std::string>>>();
    return Module{std::move(image), std::move(symbols)};
  });
}

}  // namespace gradzip::driver
