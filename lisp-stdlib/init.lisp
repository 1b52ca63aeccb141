;;; Initial values for `:init`, from the number of inputs and outputs of one unit ("fans").
;;; A matrix [in out] has those; a kernel [out in h w] has in h w inputs and out h w outputs.

(defun glorot-uniform (inputs outputs &key (gain 1))
  "Uniform ±gain √(6 / (inputs + outputs)) (Glorot and Bengio 2010)."
  (let ((bound (* gain (sqrt (/ 6 (+ inputs outputs))))))
    (uniform :low (- bound) :high bound)))

(defun glorot-normal (inputs outputs &key (gain 1))
  "Normal of deviation gain √(2 / (inputs + outputs)) (Glorot and Bengio 2010)."
  (normal :std (* gain (sqrt (/ 2 (+ inputs outputs))))))

(defun he-uniform (inputs)
  "Uniform ±√(6 / inputs), for relu (He et al. 2015)."
  (let ((bound (sqrt (/ 6 inputs))))
    (uniform :low (- bound) :high bound)))

(defun he-normal (inputs)
  "Normal of deviation √(2 / inputs), for relu (He et al. 2015)."
  (normal :std (sqrt (/ 2 inputs))))

(defun lecun-normal (inputs)
  "Normal of deviation √(1 / inputs) (LeCun et al. 1998)."
  (normal :std (sqrt (/ 1 inputs))))
