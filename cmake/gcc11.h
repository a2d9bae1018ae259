/* Included before every file of a portable library. GCC 12's libstdc++ has a new version of condition_variable::wait,
 * which GCC 11's (glibc 2.34 systems) lacks. This selects the old version of the same function. */
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
