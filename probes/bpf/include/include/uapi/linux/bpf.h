/* Empty on purpose: BCC brings its own copy of the bpf(2) definitions. */
