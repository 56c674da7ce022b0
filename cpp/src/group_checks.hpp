// What can be wrong with a group of factors, in words; empty if nothing is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "factormax/model.hpp"
#include "factormax/structured/oracle.hpp"

namespace factormax {

// The rows of factors over `size` variables.
std::string check_rule(const Rule& rule, std::int64_t size);

// Structured factors over `vars` variables each.
std::string check_oracle(const Group& group, std::int64_t vars);

// How long the lists of variables are that an oracle makes. The shape must fit.
int slots_of(OracleKind kind, const std::vector<std::int32_t>& shape);

bool are_same(const Rule& a, const Rule& b);

}  // namespace factormax
