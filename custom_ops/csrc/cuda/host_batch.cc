#include "host_batch.h"

#include "error.h"
#include "spec.h"

namespace piccard::cuda {

Leading leading(const int32_t* host_batch, int64_t R, int64_t T) {
  Leading found;
  for (int64_t r = 0; r < R; ++r) {
    const int64_t rows = host_batch[2 * r], entries = host_batch[2 * r + 1];
    if (rows < 0 || entries < 0 || (rows > kMostQueries && rows > entries)) {
      fail("host_batch[", r, "] is ", rows, " rows and ", entries, " entries: a sequence has entries for all its rows");
    }
    if (rows > kMostQueries) break;
    found.sequences = r + 1;
    found.rows += rows;
    found.queries = max(found.queries, rows);
  }
  // Bounds of a captured graph may be more than there are rows.
  if (found.sequences == R) found.rows = T;
  if (found.rows > T) fail("host_batch has ", found.rows, " rows before its first long sequence; there are ", T);
  return found;
}

int64_t rows_of(const int32_t* host_batch, int64_t R) {
  int64_t rows = 0;
  for (int64_t r = 0; r < R; ++r) rows += host_batch[2 * r];
  return rows;
}

}  // namespace piccard::cuda
