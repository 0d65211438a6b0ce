#include "doca_double.h"
