/* BCC asks for this file to recognise a kernel source tree; nothing of it is needed. */
