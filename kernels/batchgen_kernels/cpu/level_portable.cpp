#define BG_LEVEL 0
#define BG_NAMESPACE level_portable
#define BG_NAME "portable"
#include "level.h"
