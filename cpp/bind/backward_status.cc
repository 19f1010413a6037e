#include "reducer/backward_status.h"

#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bind/bindings.h"

namespace paceline {
namespace {

namespace nb = nanobind;

std::string describe(const BackwardStatus& status) {
  std::string text = "BackwardStatus(" + std::to_string(status.forwards);
  if (status.reached != 0)
    text += ", reached=" + std::to_string(status.reached);
  const auto index = [&](const char* name, std::optional<uint32_t> value) {
    if (value) text += std::string(", ") + name + "=" + std::to_string(*value);
  };
  const auto flag = [&](const char* name, bool value) {
    if (value) text += std::string(", ") + name + "=True";
  };
  index("refused", status.refused);
  index("twice", status.twice);
  index("frozen", status.frozen);
  if (status.inputs != 0) index("inputs", status.inputs);
  flag("graph_changed", status.graph_changed);
  flag("static_graph", status.static_graph);
  flag("wrote_buffers", status.wrote_buffers);
  flag("stops", status.stops);
  flag("finished", status.finished);
  flag("interrupted", status.interrupted);
  return text + ")";
}

bool agree(const std::vector<uint64_t>& words) {
  uint32_t differs = BackwardStatus::kNone;
  for (const uint64_t word : words)
    differs |= BackwardStatus::difference(words.front(), word);
  return differs != BackwardStatus::kInBoth;
}

}  // namespace

void bind_backward_status(nb::module_& m) {
  using namespace nb::literals;
  using Index = std::optional<uint32_t>;
  const auto may_be_none = nb::for_setter(nb::arg("value").none());
  nb::class_<BackwardStatus> status(m, "BackwardStatus");
  status.attr("DIGEST_BITS") = BackwardStatus::kDigestBits;
  status
      .def(
          "__init__",
          [](BackwardStatus* self, uint32_t forwards, uint32_t reached,
             Index refused, Index twice, Index frozen, uint32_t inputs,
             bool graph_changed, bool static_graph, bool wrote_buffers,
             bool stops, bool finished, bool interrupted) {
            new (self) BackwardStatus(forwards);
            self->reached = reached;
            self->refused = refused;
            self->twice = twice;
            self->frozen = frozen;
            self->inputs = inputs;
            self->graph_changed = graph_changed;
            self->static_graph = static_graph;
            self->wrote_buffers = wrote_buffers;
            self->stops = stops;
            self->finished = finished;
            self->interrupted = interrupted;
          },
          "forwards"_a = 0, nb::kw_only(), "reached"_a = 0,
          "refused"_a = nb::none(), "twice"_a = nb::none(),
          "frozen"_a = nb::none(), "inputs"_a = 0, "graph_changed"_a = false,
          "static_graph"_a = false, "wrote_buffers"_a = false,
          "stops"_a = false, "finished"_a = false, "interrupted"_a = false)
      .def(nb::init_implicit<uint32_t>())
      .def_rw("forwards", &BackwardStatus::forwards)
      .def_rw("reached", &BackwardStatus::reached)
      .def_rw("refused", &BackwardStatus::refused, may_be_none)
      .def_rw("twice", &BackwardStatus::twice, may_be_none)
      .def_rw("frozen", &BackwardStatus::frozen, may_be_none)
      .def_rw("inputs", &BackwardStatus::inputs)
      .def_rw("graph_changed", &BackwardStatus::graph_changed)
      .def_rw("static_graph", &BackwardStatus::static_graph)
      .def_rw("wrote_buffers", &BackwardStatus::wrote_buffers)
      .def_rw("stops", &BackwardStatus::stops)
      .def_rw("finished", &BackwardStatus::finished)
      .def_rw("interrupted", &BackwardStatus::interrupted)
      .def_prop_ro("is_count", &BackwardStatus::is_count)
      .def_prop_ro("is_plain", &BackwardStatus::is_plain)
      .def("begin_next", &BackwardStatus::begin_next)
      .def("pack", &BackwardStatus::pack)
      .def_static("unpack", &BackwardStatus::unpack, "word"_a)
      .def_static("agree", &agree, "words"_a,
                  "Whether ranks with data that report these words agree.")
      .def(nb::self == nb::self)
      .def("__repr__", &describe);
}

}  // namespace paceline
