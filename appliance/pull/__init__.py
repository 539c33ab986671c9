"""Getting a checkpoint onto this machine: whatever it comes from, it ends in one folder with hashes and a licence."""
