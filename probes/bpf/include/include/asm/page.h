/* PAGE_SIZE, in which BCC counts ring buffers, is given on the compiler's command line: it is the host's. */
#ifndef PAGE_SIZE
#error "PAGE_SIZE is not given"
#endif
