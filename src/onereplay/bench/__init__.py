"""What encoders cost, side by side in one process: `onereplay bench`."""
