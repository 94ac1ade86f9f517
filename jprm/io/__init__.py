"""Files: one path type for disks and buckets, outputs that appear whole and continue, JSON Lines, progress."""
