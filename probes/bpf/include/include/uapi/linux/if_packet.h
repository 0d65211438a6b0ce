/* Empty on purpose: BCC includes it, our programs define the packets they read. */
