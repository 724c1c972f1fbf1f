#define PICCARD_ISA kAvx512Isa
#define PICCARD_ISA_NAME "avx512"
#define PICCARD_LANES 16
#include "isa_loops.inl"
