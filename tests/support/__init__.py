"""What tests share: process pools, warm drivers, shared servers; see README.md."""
