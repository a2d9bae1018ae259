/* Included before every file of a library for other machines: GCC 12's name of one function of libstdc++ is the only
 * thing in it that GCC 11's libstdc++, of every system with glibc 2.34, does not have. It has the same function under
 * the older version. */
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
