#!/usr/bin/env bash
# Becomes systemd as PID 1 over the root folder $1. To be started as PID 1 of new pid, mount, uts, ipc, cgroup and net
# namespaces, as root. The root is switched before systemd starts, so that it sees nothing of this machine's own folders:
# systemd-tmpfiles would empty the temporary ones.
set -eu
root=$(realpath "$1")
[ "$$" = 1 ] || { echo "to be started as PID 1 of namespaces of its own" >&2; exit 1; }
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for folder in run tmp dev; do mount -t tmpfs tmpfs "$folder"; done
for node in null zero full random urandom tty; do
    touch "dev/$node"
    mount --bind "/dev/$node" "dev/$node"
done
mkdir -p dev/pts dev/shm old
ln -s pts/ptmx dev/ptmx  # PrivateDevices= wants it
mount -t devpts devpts dev/pts -o newinstance
pivot_root . old
umount -l old
# What containers are told apart by: systemd then leaves the kernel's own affairs alone.
export container=systemd-nspawn
exec /lib/systemd/systemd --system --log-target=journal --log-level=info
