#define PICCARD_ISA kGenericIsa
#define PICCARD_ISA_NAME "generic"
#define PICCARD_LANES 4
#include "isa_loops.inl"
