#!/bin/busybox sh
# First process of the guest: loads what it takes to mount the host's files, read-only under a tmpfs, and goes there.
export PATH=/bin
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
while read -r module; do $b insmod "/$module" || echo "cannot load $module"; done </order
mount_9p() { $b mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2"; }
mount_9p host /lower cache=loose,ro || exec $b sh
$b mount -t tmpfs -o size=70% tmpfs /tmp
$b mkdir /tmp/upper /tmp/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/tmp/upper,workdir=/tmp/work overlay /root || exec $b sh
$b mkdir -p /root/run
$b mount -t tmpfs tmpfs /root/run
$b mkdir /root/run/share /root/run/modules
mount_9p share /root/run/share cache=none || exec $b sh
mount_9p modules /root/run/modules cache=loose,ro || exec $b sh
for directory in proc sys dev; do $b mount -o move "/$directory" "/root/$directory"; done
exec $b switch_root /root /bin/bash /run/share/guest-init.sh
