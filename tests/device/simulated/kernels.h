#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace sim {

extern std::map<std::string, int64_t> calls;  // "now NAME" and "later NAME": how often

// Use the CPU's own kernels of operators that have a composite kernel, too: their bits may differ.
void use_cpu_kernels(const std::vector<std::string>& names);

}  // namespace sim
