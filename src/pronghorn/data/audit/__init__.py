"""What each training row is worth: `pronghorn data audit`."""
