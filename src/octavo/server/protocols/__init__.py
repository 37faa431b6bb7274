"""What requests say and how answers look, one set of files a protocol."""
