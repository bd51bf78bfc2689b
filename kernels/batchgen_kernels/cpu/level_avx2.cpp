#define BG_LEVEL 1
#define BG_NAMESPACE level_avx2
#define BG_NAME "avx2"
#include "level.h"
